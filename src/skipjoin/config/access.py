from __future__ import annotations

import ipaddress
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, TypeVar

from skipjoin.config.key_files import AS_ALL, KeyRights, check_key, owner_of_key, read_keys
from skipjoin.options import ConfigError, Option

access_option = partial(Option, group="Access")
# Matches all hosts or origins.
ANY = "*"
_HOST_NAME = re.compile(r"[\w.-]+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessConfig:
    """Access settings of a server.

    Attributes:
        api_keys: Keys for all routes except health. If empty, no route requires a key.
        allowed_hosts: Host header values besides localhost and IP addresses. Empty allows all, except on a server
            without keys on a loopback address.
    """

    api_keys: Annotated[
        tuple[str, ...],
        access_option(
            "API key of clients; may be repeated. Other users of the machine can see it; --api-key-file and the "
            "variable SKIPJOIN_API_KEY hide it (default: none is required).",
            flags=("--api-key",),
            envvar="SKIPJOIN_API_KEY",
            metavar="KEY",
            is_common=True,
        ),
    ] = ()
    api_key_file: Annotated[
        str | None,
        access_option(
            "File with one API key per line, and comment lines that begin with #. A line like [priority-range=0:5 "
            "priority-tier=all operator=yes weight=3] applies to the keys below it.",
            is_common=True,
        ),
    ] = None
    allow_no_key: Annotated[bool, access_option("Serve without API keys on an address that other machines reach.")] = (
        False
    )
    metrics_keys: Annotated[
        tuple[str, ...],
        access_option(
            "API key for /metrics only; may be repeated (default: the variable SKIPJOIN_METRICS_KEY, or else an "
            "--api-key, if one is required).",
            flags=("--metrics-key",),
            envvar="SKIPJOIN_METRICS_KEY",
            metavar="KEY",
        ),
    ] = ()
    metrics_key_file: Annotated[
        str | None, access_option("File with keys for /metrics only, in the format of --api-key-file.")
    ] = None
    metrics_port: Annotated[
        int | None,
        access_option(
            "Additional port that serves only /metrics and accepts only --metrics-key, if there is one; 0 picks a "
            "free port (default: none).",
            low=0,
            high=65535,
        ),
    ] = None
    allowed_hosts: Annotated[
        tuple[str, ...],
        access_option(
            "Host names of this server, separated by commas, or *. IP addresses and localhost are always allowed "
            "(default: * on a server with keys or a public address, else none).",
            separator=",",
            metavar="NAMES",
        ),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        access_option(
            "Origins whose pages may use this server from a browser, such as https://chat.example.com, separated by "
            "commas, or * (default: none).",
            separator=",",
            metavar="ORIGINS",
        ),
    ] = ()
    forwarded_allow_ips: Annotated[
        tuple[str, ...],
        access_option(
            "Addresses and networks of trusted proxies, separated by commas, or *: connection limits apply to the "
            "client in their X-Forwarded-For (default: none).",
            separator=",",
            metavar="ADDRESSES",
        ),
    ] = ()

    ssl_certfile: Annotated[
        str | None, access_option("Certificate chain for TLS, in PEM (default: plain HTTP).", metavar="FILE")
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        access_option("Private key of the certificate, in PEM (default: in --ssl-certfile).", metavar="FILE"),
    ] = None
    ssl_ca_certs: Annotated[
        str | None,
        access_option(
            "Authorities, in PEM, one of which must have signed the certificate of every client (default: clients "
            "need none).",
            metavar="FILE",
        ),
    ] = None

    key_rights: Mapping[str, KeyRights] = field(default_factory=dict, hash=False)

    @property
    def is_secure(self) -> bool:
        return self.ssl_certfile is not None

    @property
    def tls(self) -> dict[str, Any]:
        if self.ssl_certfile is None:
            return {}
        found: dict[str, Any] = {"ssl_certfile": self.ssl_certfile, "ssl_keyfile": self.ssl_keyfile}
        if self.ssl_ca_certs is not None:
            found |= {"ssl_ca_certs": self.ssl_ca_certs, "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return found

    def check_access(self) -> None:
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if self.ssl_certfile is None and getattr(self, name) is not None:
                raise ConfigError(f"{name} is for TLS: set ssl_certfile, too")
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


def check_certificates(config: AccessConfig) -> None:
    if config.ssl_certfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password="")
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        files = ", ".join(filter(None, (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)))
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"ssl_certfile: the files {files} cannot be used for TLS: {why}") from error


def with_keys_of_files(config: ConfigT) -> ConfigT:
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
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
