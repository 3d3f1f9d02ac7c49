"""What the commands share: options made from annotated fields, and how bad input is told."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from skipjoin.config import DEPRECATED
from skipjoin.knobs import ConfigError, Setting, Value, settings_of
from skipjoin.model.config import ModelError
from skipjoin.profile import read_profile
from skipjoin.recipes import Recipe, check_names, described, find
from skipjoin.sampling import ParameterError

BAD_INPUT = 2
# Values of options by the names of the fields that they are for.
Values = dict[str, Any]


@contextmanager
def plain_errors() -> Iterator[None]:
    """Bad input is one line on stderr and exit code 2, not a traceback."""
    try:
        yield
    except (ConfigError, ModelError, ParameterError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from error


@dataclass(frozen=True, slots=True)
class Section:
    """Options for the fields of a dataclass that have a knob. names: which of them; None: all that are for the command
    line. finish: what the values pass through before the command gets them; it may raise `ConfigError`."""

    source: type
    names: Collection[str] | None = None
    finish: Callable[[Values], Values] = lambda values: values

    def settings(self) -> list[Setting]:
        """The fields, in their order."""
        known = settings_of(self.source)
        wanted = known if self.names is None else self.names
        return [setting for name, setting in known.items() if name in wanted and setting.knob.option]


def takes(**sections: Section) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of each section, whose values it gets as a dictionary in the argument of that name.

    The command's own parameters come first in its help. Raises ValueError where two options have a name or a flag in
    common. `ConfigError` and the like, raised by the command, become one line and exit code 2.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parts = {name: section.settings() for name, section in sections.items()}
        parameters = [_option(setting) for settings in parts.values() for setting in settings]
        hints = get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=hints[name])
            for name, parameter in inspect.signature(command).parameters.items()
            if name not in sections
        ]
        _check_conflicts([*own, *parameters])

        @functools.wraps(command)
        def run(**given: Any) -> None:
            with plain_errors():
                for name, settings in parts.items():
                    values = {setting.name: _value(setting, given.pop(setting.name)) for setting in settings}
                    given[name] = sections[name].finish(values)
                command(**given)

        ordered = sorted([*own, *parameters], key=_place)
        run.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered}
        return run

    return decorate


def _option(setting: Setting) -> inspect.Parameter:
    """A parameter that Typer makes an option, or an argument, of."""
    knob, kind = setting.knob, setting.kind
    default = inspect.Parameter.empty if setting.default is MISSING else setting.default
    if get_origin(kind) in (tuple, dict):  # several values: the flag is repeated
        kind = list[str]
        default = default if default is inspect.Parameter.empty else []
    else:
        kind = str if setting.words else kind  # read by the setting, which knows its words
        kind = kind | None if setting.optional else kind
    if knob.positional:
        info = typer.Argument(help=setting.help)
        place = inspect.Parameter.POSITIONAL_OR_KEYWORD
    else:
        info = typer.Option(
            *(knob.flags or (f"--{setting.name.replace('_', '-')}",)),
            help=setting.help,
            metavar=knob.metavar,
            rich_help_panel=knob.group,
            envvar=knob.envvar,
        )
        place = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(setting.name, place, default=default, annotation=Annotated[kind, info])


def _place(parameter: inspect.Parameter) -> tuple[bool, bool]:
    """Arguments first, deprecated options last; the others stay in their order."""
    (info,) = parameter.annotation.__metadata__
    return parameter.kind is parameter.KEYWORD_ONLY, info.rich_help_panel == DEPRECATED


def _value(setting: Setting, given: Any) -> Any:
    if setting.words and given is not None:
        return setting.read(given)
    return tuple(given or ()) if get_origin(setting.kind) is tuple else given


def _check_conflicts(parameters: Sequence[inspect.Parameter]) -> None:
    seen: set[str] = set()
    for parameter in parameters:
        (info,) = parameter.annotation.__metadata__
        flags = [flag for flag in (info.default, *(info.param_decls or ())) if isinstance(flag, str)]
        for name in (parameter.name, *(flags or [f"--{parameter.name.replace('_', '-')}"])):
            if name in seen:
                raise ValueError(f"two options of a command are called {name}")
            seen.add(name)


def read_assignments(recipes: Sequence[Recipe], texts: Iterable[str]) -> dict[str, Value]:
    """Parameters of recipes from texts such as "starvation_s=3". Raises `ConfigError`, naming the parameters that the
    recipes have, for a text of another form, a name given twice, and a parameter that no recipe has."""
    found: dict[str, Value] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals):
            raise ConfigError(f"set must be NAME=VALUE, got {text!r}: {described(recipes)}")
        if name in found:
            raise ConfigError(f"set: {name} is given twice")
        check_names(recipes, [name])
        found[name] = next(one.parameters[name] for one in recipes if name in one.parameters).read(value)
    return found


def engine_values(values: Values) -> Values:
    """What an engine's options mean: the texts of `--set` are read, and the file of a profile is looked at before
    anything slow begins. Raises `ConfigError`."""
    if values["profile"] not in ("auto", "off", ""):
        read_profile(Path(values["profile"]))
    texts = values["recipe_params"] or ()
    return values | {"recipe_params": read_assignments([find(values["recipe"])], texts)}
