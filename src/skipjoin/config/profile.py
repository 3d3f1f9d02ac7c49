from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import sys
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from skipjoin.config import ConfigError
from skipjoin.policies.cost import LinearCost
from skipjoin.system.disk import why_not_written
from skipjoin.system.durable import locked, make_private, write_durably
from skipjoin.system.folders import cache_folder, is_trusted

# Incremented when older files can no longer be read.
FORMAT = 8
# Environment variable that names the folder of cached profiles.
CACHE_VARIABLE = "SKIPJOIN_PROFILE_CACHE"

# Median error of the fit from which steps are measured again. On a quiet machine it is a few percent.
MAX_MEDIAN_ERROR = 0.15

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """Identity of a profile, except for `model`, its name for messages. `shape` is a hash of the configuration."""

    model: str
    shape: str
    device_kind: str
    device: str
    threads: int
    dtype: str
    kv_cache_dtype: str
    swap_dtype: str
    attention: str
    operators: str
    tp: int
    pp: int
    version: str

    @property
    def digest(self) -> str:
        identity = dataclasses.asdict(self) | {"model": ""}
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Cost of moving n KV blocks in one direction: floor + block * n seconds."""

    floor: float
    block: float


@dataclass(frozen=True, slots=True)
class FitErrors:
    """Absolute relative errors of the cost model, on held-out shapes or, if there are none, the fitted ones."""

    median: float
    p95: float
    fitted: int
    held_out: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Measured step: its shape, the lower quartile of its seconds, and its number of runs."""

    prefill: int
    attention: int
    decodes: int
    context: int
    seconds: float
    runs: int
    held_out: bool


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured cost model and its circumstances.

    Attributes:
        cost: Includes `unrest`. Transfers are per block of `block_size` tokens, in the slower direction.
        state_bytes: Of a request's state that is no KV.
        unrest: Ratio of a step's mean time to its undisturbed time, which the fit uses.
    """

    key: ProfileKey
    cost: LinearCost
    transfer_out: Transfer
    transfer_in: Transfer
    unrest: float
    host_s: float
    block_size: int
    kv_bytes_per_block: int
    cpu_bytes_per_block: int
    weight_bytes: int
    state_bytes: int
    vocab_size: int
    max_positions: int
    stage_shares: tuple[float, ...]
    errors: FitErrors
    samples: tuple[Sample, ...]
    machine: dict[str, str]
    date: str

    @property
    def is_poor(self) -> bool:
        return self.errors.median > MAX_MEDIAN_ERROR

    def cost_for(self, block_size: int) -> LinearCost:
        return dataclasses.replace(self.cost, block=self.cost.block * block_size / self.block_size)


def cache_path(key: ProfileKey) -> Path:
    folder = os.environ.get(CACHE_VARIABLE)
    return (cache_folder() / "profiles" if folder is None else Path(folder)) / f"{key.digest}.json"


@contextmanager
def measures_alone(key: ProfileKey) -> Iterator[None]:
    """Hold a lock per key, so that of several engines one measures, undisturbed.

    Raises:
        BlockingIOError: Another process holds it.
    """
    if not _is_cache_trusted(key):
        yield
        return
    with locked(cache_path(key), waits=False) as problem:
        if problem:
            _log.warning("the profile cannot be locked, so several engines may measure at once: %s", problem)
        yield


def cached_profile(key: ProfileKey) -> Profile | None:
    """Return the cached profile of this key, unless it is damaged or writable by another user."""
    path = cache_path(key)
    if not (_is_cache_trusted(key) and path.is_file()):
        return None
    try:
        profile = read_profile(path)
    except ConfigError as error:
        _log.warning("the cached profile is invalid and is measured again: %s", error)
        return None
    return profile if profile.key.digest == key.digest else None


def cache_profile(profile: Profile) -> None:
    if _is_cache_trusted(profile.key):
        write_profile(profile, cache_path(profile.key))


def _is_cache_trusted(key: ProfileKey) -> bool:
    return is_trusted(cache_path(key), "the cached profile")


def check_writable(path: Path) -> None:
    try:
        make_private(path.parent)
    except OSError as error:
        raise ConfigError(f"profile {path} cannot be written: {why_not_written(error, path)}") from error
    if path.is_dir():
        raise ConfigError(f"profile {path} cannot be written: it is a folder; name a file")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"profile {path} cannot be written: its folder allows no new files")


def write_profile(profile: Profile, path: Path) -> None:
    try:
        make_private(path.parent)
        content = json.dumps({"format": FORMAT} | dataclasses.asdict(profile), indent=1) + "\n"
        write_durably(path, content.encode(), mode=0o644)
    except OSError as error:
        raise ConfigError(f"profile {path} cannot be written: {why_not_written(error, path)}") from error


def read_profile(path: Path) -> Profile:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"profile {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"profile {path} is not JSON: {error}") from error
    found = raw.get("format") if isinstance(raw, dict) else None
    if found != FORMAT:
        raise ConfigError(f"profile {path}: format must be {FORMAT}, got {found!r}; measure it again")
    try:
        profile = _decode(Profile, raw, "")
        _check(profile)
    except ValueError as error:
        raise ConfigError(f"profile {path}: {error}") from error
    return profile


def _check(profile: Profile) -> None:
    sizes = ("block_size", "kv_bytes_per_block", "cpu_bytes_per_block", "weight_bytes", "vocab_size", "max_positions")
    for name in sizes:
        if getattr(profile, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(profile, name)}")
    if len(profile.stage_shares) != profile.key.pp or not all(share > 0 for share in profile.stage_shares):
        raise ValueError(f"stage_shares must be {profile.key.pp} numbers above 0, got {list(profile.stage_shares)}")


# -- from JSON to dataclasses: every field must be present and of its type, and numbers finite and nonnegative ---------


def _decode(kind: type[T], raw: object, where: str) -> T:
    if dataclasses.is_dataclass(kind):
        return typing.cast("T", _decode_fields(kind, raw, where))
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and isinstance(raw, list):
        item = arguments[0]
        return typing.cast("T", tuple(_decode(item, value, f"{where}[{index}]") for index, value in enumerate(raw)))
    if origin is dict and isinstance(raw, dict):
        return typing.cast("T", {name: _decode(str, value, f"{where}.{name}") for name, value in raw.items()})
    if kind is float and isinstance(raw, int | float) and not isinstance(raw, bool):
        return typing.cast("T", float(_number(raw, where)))
    if kind is int and isinstance(raw, int) and not isinstance(raw, bool):
        return typing.cast("T", _number(raw, where))
    if (kind is str and isinstance(raw, str)) or (kind is bool and isinstance(raw, bool)):
        return typing.cast("T", raw)
    name = kind.__name__ if isinstance(kind, type) and not isinstance(kind, types.GenericAlias) else str(kind)
    raise ValueError(f"{where} must be a value of type {name}, got {_short(raw)}")


def _decode_fields(kind: type[Any], raw: object, where: str) -> object:
    if not isinstance(raw, dict):
        raise ValueError(f"{where} must be an object, got {_short(raw)}")
    hints = typing.get_type_hints(kind)
    values = {}
    for field in dataclasses.fields(kind):
        name = f"{where}.{field.name}" if where else field.name
        if field.name not in raw:
            raise ValueError(f"{name} is missing")
        values[field.name] = _decode(hints[field.name], raw[field.name], name)
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _number(value: float, where: str) -> float:
    if not 0 <= value <= sys.float_info.max:  # a JSON integer may exceed the largest float
        raise ValueError(f"{where} must be finite and at least 0, got {value}")
    return value


def _short(raw: object) -> str:
    text = repr(raw)
    return text if len(text) <= 40 else f"{text[:40]}..."
