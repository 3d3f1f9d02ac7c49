"""Access settings of a server, a part of `ServerConfig`."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeVar

from skipjoin.config.key_files import AS_ALL, KeyRights, check_key, owner_of_key, read_keys
from skipjoin.options import ConfigError, Knob

ACCESS = "Access"
# Matches all hosts or origins.
ANY = "*"
_HOST_NAME = re.compile(r"[\w.-]+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """Access settings of a server.

    Attributes:
        api_keys: Each grants access to all routes except health, which is open; empty requires no key.
        metrics_keys: Each grants access to /metrics besides `api_keys`.
        allowed_hosts: Host header values besides localhost and IP addresses. Empty allows all, except on a server
            without keys on a loopback address.
        key_rights: Rights of the keys from the file, by `owner_of_key`.
    """

    api_keys: Annotated[
        tuple[str, ...],
        Knob(
            "Key that clients must send; may be repeated. Other users of the machine see it. Without this option "
            "SKIPJOIN_API_KEY in the environment is one (default: none is asked for).",
            flags=("--api-key",),
            envvar="SKIPJOIN_API_KEY",
            metavar="KEY",
            group=ACCESS,
        ),
    ] = ()
    api_key_file: Annotated[
        str | None,
        Knob(
            "File with such keys, one per line; lines that begin with # are left out. A line like "
            "[priority-range=0:5 priority-tier=all operator=yes] is about the keys that follow.",
            metavar="FILE",
            group=ACCESS,
        ),
    ] = None
    metrics_keys: Annotated[
        tuple[str, ...],
        Knob(
            "Key for /metrics alone; may be repeated. Without this option SKIPJOIN_METRICS_KEY in the environment is "
            "one (default: a key as for all else, if one is asked for).",
            flags=("--metrics-key",),
            envvar="SKIPJOIN_METRICS_KEY",
            metavar="KEY",
            group=ACCESS,
        ),
    ] = ()
    metrics_key_file: Annotated[
        str | None, Knob("File with keys for /metrics alone, as --api-key-file.", metavar="FILE", group=ACCESS)
    ] = None
    metrics_port: Annotated[
        int | None,
        Knob(
            "Port that serves /metrics, and nothing else, beside --port; it asks for a --metrics-key if there is one, "
            "and for no other; 0 picks a free one (default: none).",
            low=0,
            high=65535,
            group=ACCESS,
        ),
    ] = None
    allowed_hosts: Annotated[
        tuple[str, ...],
        Knob(
            "Names by which clients may address this server, separated by commas; * is any. IP addresses and localhost "
            "are always among them (default: no other where only this machine reaches it and no key is asked for).",
            separator=",",
            metavar="NAMES",
            group=ACCESS,
        ),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        Knob(
            "Sites whose pages may use this server from a browser, such as https://chat.example.com, separated by "
            "commas; * is any (default: none).",
            separator=",",
            metavar="ORIGINS",
            group=ACCESS,
        ),
    ] = ()
    forwarded_allow_ips: Annotated[
        tuple[str, ...],
        Knob(
            "Addresses and networks of proxies, separated by commas, whose X-Forwarded-For names the client that the "
            "limits of connections count; * is any (default: none).",
            separator=",",
            metavar="ADDRESSES",
            group=ACCESS,
        ),
    ] = ()

    key_rights: Mapping[str, KeyRights] = field(default_factory=dict, hash=False)

    def check_access(self) -> None:
        """Raise `ConfigError` for invalid access settings."""
        for name, keys in (("api_key", self.api_keys), ("metrics_key", self.metrics_keys)):
            for key in keys:
                check_key(name, key)
        for name in self.allowed_hosts:
            if name != ANY and not _HOST_NAME.fullmatch(name):
                raise ConfigError(
                    f"allowed_hosts must be * or names like llm.example.com, without a port, got {name!r}"
                )
        for address in self.forwarded_allow_ips:
            if address != ANY and not _is_network(address):
                raise ConfigError(
                    f"forwarded_allow_ips must be * or addresses and networks like 10.0.0.0/8, got {address!r}"
                )
        for origin in self.cors_origins:
            if origin != ANY and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    "cors_origins must be * or like https://chat.example.com, in small letters and without a path, "
                    f"got {origin!r}"
                )


ConfigT = TypeVar("ConfigT", bound=AccessConfig)


def with_keys_of_files(config: ConfigT) -> ConfigT:
    """Return the configuration with the keys from its files added.

    Raises:
        ConfigError: A file has no keys, or keys have conflicting or invalid settings.
    """
    found = read_keys("api_key_file", config.api_key_file)
    for_metrics = read_keys("metrics_key_file", config.metrics_key_file)
    if set(for_metrics.values()) - {AS_ALL}:
        raise ConfigError(f"metrics_key_file {config.metrics_key_file}: keys that open /metrics alone have no settings")
    if any(found.get(key, AS_ALL) != AS_ALL for key in config.api_keys):
        raise ConfigError(f"api_key_file {config.api_key_file} gives settings to a key that api_key gives, too")
    return replace(
        config,
        api_keys=(*config.api_keys, *found),
        metrics_keys=(*config.metrics_keys, *for_metrics),
        key_rights={owner_of_key(key.encode()): rights for key, rights in found.items()},
        api_key_file=None,
        metrics_key_file=None,
    )


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Return whether an IP address is reachable from its own machine only."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
