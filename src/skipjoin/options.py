"""A setting is spelled once: a dataclass field annotated with a `Knob` has its name, type, default, help and bounds.

    @dataclass(frozen=True)
    class Pool:
        block_size: Annotated[int, Knob("Tokens per KV block.", low=1, high=1024)] = 16

        def __post_init__(self) -> None:
            check(self)

The check, the text of its error, the options of the command line and the list of a recipe's parameters follow from it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

# What one setting may be, where settings come by name.
Value = bool | int | float | str
# What a value of a type is called in errors, and what Python takes for one.
_KINDS: Mapping[type, tuple[str, type]] = {
    int: ("an integer", Integral),
    float: ("a number", Real),
    bool: ("true or false", bool),
}
_BOOLS = {"true": True, "false": False}
_FOUND: dict[type, Mapping[str, Setting]] = {}  # by class, what `settings_of` found


class ConfigError(ValueError):
    """A setting outside its bounds. The text names the setting and the bound."""


def unknown(field: str, got: str, known: Iterable[str]) -> ConfigError:
    """What to raise for a name that is not one of `known`: it tells the nearest of them, or all, in their order."""
    names = list(known)
    hint = nearest(got, names) or f"; choose from {', '.join(names)}"
    return ConfigError(f"{field}: there is no {got!r}{hint}")


def nearest(got: str, known: Iterable[str]) -> str:
    """The end of an error about a name that is not one of `known`: the names that it resembles; empty: none."""
    near = difflib.get_close_matches(got.strip().lower(), list(known), n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""


@dataclass(frozen=True, slots=True)
class Knob:
    """What there is to know about a setting besides its name, type and default.

    help: a sentence for users. low, above: the least value, and what every value is above; high: the largest. choices:
    all values that there are; the help lists them. flags: options of the command line; empty: the name with hyphens.
    metavar: what the help calls the value, its unit for one. group: the help's group. envvar: an environment variable
    that gives the value, too. positional: an argument of the command line, not an option. option: whether it is on the
    command line at all.
    """

    help: str
    _: dataclasses.KW_ONLY
    low: float | None = None
    above: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    group: str | None = None
    envvar: str | None = None
    positional: bool = False
    option: bool = True
    separator: str = ""


@dataclass(frozen=True, slots=True)
class Setting:
    """A field with a knob.

    kind: its type, without the None that `optional` stands for and the `words`, strings that it may be instead: those
    of a Literal beside the type, as in `int | Literal["all"]`. default: MISSING if it has none.
    """

    name: str
    kind: Any
    words: tuple[str, ...]
    optional: bool
    default: Any
    knob: Knob

    @property
    def help(self) -> str:
        """The knob's help and its choices."""
        if not self.knob.choices:
            return self.knob.help
        *most, last = self.knob.choices
        return f"{self.knob.help.rstrip('.')}: {', '.join(most)} or {last}."

    @property
    def bounds(self) -> str:
        """Which values there may be, such as "in [1, 1024]", "above 0" or "at least 1 or all"; empty: any."""
        return self._or_words(self._bounds)

    @property
    def _bounds(self) -> str:
        low, above, high = self.knob.low, self.knob.above, self.knob.high
        if self.knob.choices:
            return f"one of {', '.join(self.knob.choices)}"
        if high is not None:
            start = f"({_text(above)}" if above is not None else f"[{_text(low)}"
            return f"in {start}, {_text(high)}]"
        if above is not None:
            return f"above {_text(above)}"
        return "" if low is None else f"at least {_text(low)}"

    def check(self, value: Any) -> None:
        """Raise `ConfigError` for a value of another type or outside the bounds."""
        if (value is None and self.optional) or (isinstance(value, str) and value in self.words):
            return
        if self.kind in _KINDS:
            called, wanted = _KINDS[self.kind]
            if not isinstance(value, wanted) or (isinstance(value, bool) and self.kind is not bool):
                raise ConfigError(f"{self.name} must be {self._or_words(called)}, got {value!r}")
        if not self._allows(value):
            shown = f"{value!r}{nearest(str(value), self.knob.choices)}" if self.knob.choices else value
            raise ConfigError(f"{self.name} must be {self.bounds}, got {shown}")

    def read(self, text: str) -> Value:
        """The value that a text spells. Raises `ConfigError` for one of another type."""
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
        knob = self.knob
        if knob.choices:
            return value in knob.choices
        # Written so that a number that is none is refused.
        return (
            (knob.low is None or value >= knob.low)
            and (knob.above is None or value > knob.above)
            and (knob.high is None or value <= knob.high)
        )


def settings_of(cls: type) -> Mapping[str, Setting]:
    """The fields of a dataclass that have a knob, by name, in their order."""
    if cls not in _FOUND:
        _FOUND[cls] = _find_settings(cls)
    return _FOUND[cls]


def _find_settings(cls: type) -> dict[str, Setting]:
    hints = get_type_hints(cls, include_extras=True)
    found: dict[str, Setting] = {}
    for field in dataclasses.fields(cls):
        if get_origin(hints[field.name]) is Annotated:
            kind, *extras = get_args(hints[field.name])
            knob = next((extra for extra in extras if isinstance(extra, Knob)), None)
            if knob is not None:
                found[field.name] = Setting(field.name, *_parts(kind), _default(field), knob)
    return found


def check(instance: Any) -> None:
    """Raise `ConfigError` for the first field whose value is of another type than it says or outside its bounds."""
    for name, setting in settings_of(type(instance)).items():
        setting.check(getattr(instance, name))


def _parts(kind: Any) -> tuple[Any, tuple[str, ...], bool]:
    """A field's type, the words that it may be instead, and whether it may be None."""
    parts = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    words = tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part))
    types = [part for part in parts if part is not NoneType and get_origin(part) is not Literal]
    return (types[0] if len(types) == 1 else kind), words, NoneType in parts


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _text(bound: float | None) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)
