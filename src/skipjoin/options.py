"""Settings declared as dataclass fields annotated with an `Option`.

    @dataclass(frozen=True)
    class Pool:
        block_size: Annotated[int, Option("Tokens per KV block.", low=1, high=1024)] = 16

        def __post_init__(self) -> None:
            check(self)

The check, its error, the command-line option and the list of a recipe's parameters are derived from the field.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

# Type of a setting given by name.
Value = bool | int | float | str
# By type: its name in errors, and the Python types that are accepted.
_KINDS: Mapping[type, tuple[str, type]] = {
    int: ("an integer", Integral),
    float: ("a number", Real),
    bool: ("true or false", bool),
}
_BOOLS = {"true": True, "false": False, "on": True, "off": False}
# Metavars of settings that have none, by the unit or kind at the end of their name.
_METAVARS = {
    "_s": "SECONDS",
    "_ms": "MILLISECONDS",
    "_gib": "GIB",
    "_bytes": "BYTES",
    "_gbps": "GBPS",
    "_url": "URL",
    "_dir": "DIR",
    "_file": "FILE",
}
_FOUND: dict[type, Mapping[str, Setting]] = {}  # cache of `settings_of`


class ConfigError(ValueError):
    """Invalid setting. The text names the setting and its bound."""


def unknown(field: str, got: str, known: Iterable[str]) -> ConfigError:
    names = list(known)
    hint = nearest(got, names) or f"; choose from {', '.join(names)}"
    return ConfigError(f"{field}: there is no {got!r}{hint}")


def nearest(got: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(got.strip().lower(), list(known), n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""


@dataclass(frozen=True, slots=True)
class Option:
    """Metadata of a setting besides its name, type and default."""

    help: str
    _: dataclasses.KW_ONLY
    low: float | None = None
    above: float | None = None  # exclusive lower bound
    high: float | None = None
    choices: Collection[str] = ()  # allowed values; may grow, as a registry does
    flags: tuple[str, ...] = ()  # empty derives one from the name
    metavar: str | None = None  # None derives it from the name
    group: str | None = None
    envvar: str | None = None
    is_positional: bool = False
    separator: str = ""  # of several values in one text; empty if only repeating the flag gives several
    is_common: bool = False  # shown by `--help`, not only by `--help-all`
    is_internal: bool = False  # no command has it as an option


@dataclass(frozen=True, slots=True)
class Setting:
    """Dataclass field with an `Option`."""

    name: str
    kind: Any
    words: tuple[str, ...]  # literal strings allowed besides `kind`
    is_optional: bool
    default: Any
    option: Option

    @property
    def help(self) -> str:
        if not self.option.choices:
            return self.option.help
        *most, last = self.option.choices
        return f"{self.option.help.rstrip('.')}: {', '.join(most)} or {last}."

    @property
    def metavar(self) -> str | None:
        return self.option.metavar or next((word for end, word in _METAVARS.items() if self.name.endswith(end)), None)

    @property
    def bounds(self) -> str:
        return self._or_words(self._bounds)

    @property
    def _bounds(self) -> str:
        low, above, high = self.option.low, self.option.above, self.option.high
        if self.option.choices:
            return f"one of {', '.join(self.option.choices)}"
        if high is not None:
            start = f"({_text(above)}" if above is not None else f"[{_text(low)}"
            return f"in {start}, {_text(high)}]"
        if above is not None:
            return f"above {_text(above)}"
        return "" if low is None else f"at least {_text(low)}"

    def check(self, value: Any) -> None:
        if (value is None and self.is_optional) or (isinstance(value, str) and value in self.words):
            return
        if self.kind in _KINDS:
            called, wanted = _KINDS[self.kind]
            if not isinstance(value, wanted) or (isinstance(value, bool) and self.kind is not bool):
                raise ConfigError(f"{self.name} must be {self._or_words(called)}, got {value!r}")
        if not self._allows(value):
            shown = f"{value!r}{nearest(str(value), self.option.choices)}" if self.option.choices else value
            raise ConfigError(f"{self.name} must be {self.bounds}, got {shown}")

    def read(self, text: str) -> Value:
        if text in self.words:
            return text
        try:
            value: Value = _BOOLS[text.strip().lower()] if self.kind is bool else self.kind(text)
        except (ValueError, KeyError):
            raise ConfigError(f"{self.name} must be {self._or_words(_KINDS[self.kind][0])}, got {text!r}") from None
        return value

    def _or_words(self, what: str) -> str:
        return " or ".join(part for part in (what, *self.words) if part)

    def _allows(self, value: Any) -> bool:
        option = self.option
        if option.choices:
            return value in option.choices
        # Written so that NaN is rejected.
        return (
            (option.low is None or value >= option.low)
            and (option.above is None or value > option.above)
            and (option.high is None or value <= option.high)
        )


def settings_of(cls: type) -> Mapping[str, Setting]:
    if cls not in _FOUND:
        _FOUND[cls] = _find_settings(cls)
    return _FOUND[cls]


def _find_settings(cls: type) -> dict[str, Setting]:
    hints = get_type_hints(cls, include_extras=True)
    found: dict[str, Setting] = {}
    for field in dataclasses.fields(cls):
        if get_origin(hints[field.name]) is Annotated:
            kind, *extras = get_args(hints[field.name])
            option = next((extra for extra in extras if isinstance(extra, Option)), None)
            if option is not None:
                found[field.name] = Setting(field.name, *_parts(kind), _default(field), option)
    return found


def check(instance: Any) -> None:
    """Raise `ConfigError` for the first field whose value has another type or is out of bounds."""
    for name, setting in settings_of(type(instance)).items():
        setting.check(getattr(instance, name))


def _parts(kind: Any) -> tuple[Any, tuple[str, ...], bool]:
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    words = tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part))
    types = [part for part in parts if part is not NoneType and get_origin(part) is not Literal]
    return (types[0] if len(types) == 1 else kind), words, NoneType in parts


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _text(bound: float | None) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)
