from __future__ import annotations

import functools
import inspect
import itertools
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from skipjoin.cli.settings_file import read_settings, variable
from skipjoin.config.profile import read_profile
from skipjoin.model.errors import ModelError
from skipjoin.options import ConfigError, Setting, settings_of
from skipjoin.recipes import find, read_assignments
from skipjoin.sampling import ParameterError
from skipjoin.server import logs

BAD_INPUT = 2
_HELP_ALL = "help_all"
# Values of options by field name.
Values = dict[str, Any]


@contextmanager
def plain_errors(flags: Mapping[str, str] = MappingProxyType({}), *, as_json: bool = False) -> Iterator[None]:
    """Print invalid input as one line on stderr, in JSON mode as a log record, and exit with code 2."""
    try:
        yield
    except (ConfigError, ModelError, ParameterError) as error:
        text = with_flags(str(error), {**_typed(), **flags})
        if as_json:
            logs.configure("info", "json")
            logs.fail(text)
        else:
            print(f"error: {text}", file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from error


def _typed() -> dict[str, str]:
    flags = [argument.partition("=")[0] for argument in sys.argv if argument.startswith("--")]
    return {_name_in(flag): flag for flag in flags}


def _name_in(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def with_flags(text: str, flags: Mapping[str, str]) -> str:
    """Replace names of settings in an error by their flags.

    A name without an underscore may be an ordinary word, and is replaced only at the beginning.
    """

    def flag(found: re.Match[str]) -> str:
        name = found[0]
        is_name = name in flags and ("_" in name or found.start() == 0)
        return flags[name] if is_name else name

    return re.sub(r"(?<![\w/.-])\w+(?![\w/=-]|\.\w)", flag, text)


@dataclass(frozen=True, slots=True)
class Section:
    """Options for the fields of a dataclass that have an `Option`, or only for `names`."""

    source: type
    names: Collection[str] | None = None
    finish: Callable[[Values], Values] = lambda values: values
    from_environment: bool = False

    def settings(self) -> list[Setting]:
        known = settings_of(self.source)
        wanted = known if self.names is None else self.names
        return [setting for name, setting in known.items() if name in wanted and not setting.option.is_internal]


def takes(**sections: Section) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parts = {name: section.settings() for name, section in sections.items()}
        parameters = [
            _option(setting, sections[name].from_environment)
            for name, settings in parts.items()
            for setting in settings
        ]
        hints = get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=hints[name])
            for name, parameter in inspect.signature(command).parameters.items()
            if name not in sections
        ]
        parameters += [_CONFIG, *_help_all(parameters)]
        _check_conflicts([*own, *parameters])

        @functools.wraps(command)
        def run(**given: Any) -> None:
            for name in _HANDLED_BY_CALLBACK:
                given.pop(name, None)
            given = {name: _at_home(value) for name, value in given.items()}
            with plain_errors(typed_flags(parts.values()), as_json=given.get("log_format") == "json"):
                for name, settings in parts.items():
                    values = {setting.name: _value(setting, given.pop(setting.name)) for setting in settings}
                    given[name] = sections[name].finish(values)
                command(**given)

        ordered = sorted([*own, *parameters], key=lambda item: item.kind is item.KEYWORD_ONLY)
        run.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered}
        run.settings = {setting.name: setting for settings in parts.values() for setting in settings}  # type: ignore[attr-defined]
        return run

    return decorate


def typed_flags(sections: Iterable[Sequence[Setting]]) -> dict[str, str]:
    typed = {argument.partition("=")[0] for argument in sys.argv}
    found: dict[str, str] = {}
    for setting in itertools.chain.from_iterable(sections):
        if not setting.option.is_positional:
            flags = [flag for text in flags_of(setting) for flag in text.split("/")]
            flag = next((flag for flag in flags if flag in typed), flags[0])
            found |= dict.fromkeys((setting.name, _name_in(flag)), flag)
    return found


def variables_of(sections: Iterable[Section]) -> list[str]:
    settings = (setting for section in sections for setting in section.settings() if section.from_environment)
    return [name for setting in settings if (name := _variable(setting)) is not None]


def _variable(setting: Setting) -> str | None:
    if setting.option.envvar is not None:
        return setting.option.envvar
    # Typer would split texts at blanks, which may be part of them.
    several_texts = get_origin(setting.kind) is tuple
    return None if several_texts else variable(flags_of(setting)[0].partition("/")[0])


def _use_file(context: typer.Context, path: Path | None) -> Path | None:
    if path is not None:
        parameters = [param for param in context.command.params if param.name != _CONFIG.name]
        known = {flag.lstrip("-").lower(): str(parameter.name) for parameter in parameters for flag in parameter.opts}
        several = {str(parameter.name) for parameter in parameters if getattr(parameter, "multiple", False)}
        with plain_errors():
            context.default_map = dict(read_settings(_at_home(path), known, several))
    return path


_HANDLED_BY_CALLBACK = ("config", _HELP_ALL)
_CONFIG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="YAML file with settings, named like these flags. Flags take precedence.",
            is_eager=True,
            callback=_use_file,
        ),
    ],
)


def _help_all(parameters: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    omitted = sum(parameter.annotation.__metadata__[0].hidden for parameter in parameters)
    text = f"Show all options, {omitted} more than --help does."
    info = typer.Option("--help-all", is_eager=True, callback=_print_full_help, help=text)
    annotation = Annotated[bool, info]
    kind = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(_HELP_ALL, kind, default=False, annotation=annotation)] if omitted else []


def _print_full_help(context: typer.Context, is_wanted: bool) -> None:
    if is_wanted:
        for parameter in context.command.params:
            parameter.hidden = False  # type: ignore[attr-defined]
        typer.echo(context.get_help())
        raise typer.Exit


def _option(setting: Setting, from_environment: bool) -> inspect.Parameter:
    option, kind = setting.option, setting.kind
    envvar = _variable(setting) if from_environment else option.envvar
    default = inspect.Parameter.empty if setting.default is MISSING else setting.default
    if get_origin(kind) in (tuple, dict):  # several values by repeating the flag
        kind = list[str]
        default = default if default is inspect.Parameter.empty else []
    else:
        kind = str if setting.words else kind  # parsed by the setting, which has special words
        kind = kind | None if setting.is_optional else kind
    if option.is_positional:
        info = typer.Argument(help=setting.help, envvar=envvar, show_envvar=False)
    else:
        info = typer.Option(
            *flags_of(setting),
            help=setting.help,
            metavar=setting.metavar,
            rich_help_panel=option.group,
            hidden=not option.is_common and default is not inspect.Parameter.empty,
            # Typer would split a variable's text at blanks, and treat an empty one as unset.
            envvar=None if option.envvar and get_origin(kind) is list else envvar,
            show_envvar=option.envvar is not None,
        )
    place = inspect.Parameter.POSITIONAL_OR_KEYWORD if option.is_positional else inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(setting.name, place, default=default, annotation=Annotated[kind, info])


def flags_of(setting: Setting) -> tuple[str, ...]:
    """Return the flags of an option. Booleans have a negative flag, to override a file or the environment."""
    name = setting.name.replace("_", "-")
    return setting.option.flags or (f"--{name}/--no-{name}" if setting.kind is bool else f"--{name}",)


def _at_home(given: Any) -> Any:
    """Expand ~/, which shells replace neither in files nor after --option=."""
    return (
        type(given)(os.path.expanduser(given)) if isinstance(given, (str, Path)) and str(given)[:2] == "~/" else given
    )


def _value(setting: Setting, given: Any) -> Any:
    if setting.words and given is not None:
        return setting.read(given)
    if get_origin(setting.kind) is not tuple:
        return given
    texts, separator = given or _from_environment(setting), setting.option.separator
    return tuple(part.strip() for text in texts for part in text.split(separator)) if separator else tuple(texts)


def _from_environment(setting: Setting) -> tuple[str, ...]:
    name = setting.option.envvar
    if name is None or name not in os.environ:
        return ()
    if not os.environ[name]:
        raise ConfigError(f"{name} is set but empty: give it a value, or unset it")
    return (os.environ[name],)


def _check_conflicts(parameters: Sequence[inspect.Parameter]) -> None:
    seen: set[str] = set()
    for parameter in parameters:
        (info,) = parameter.annotation.__metadata__
        flags = [flag for flag in (info.default, *(info.param_decls or ())) if isinstance(flag, str)]
        for name in (parameter.name, *(flags or [f"--{parameter.name.replace('_', '-')}"])):
            if name in seen:
                raise ValueError(f"two options of a command are called {name}")
            seen.add(name)


def engine_values(values: Values) -> Values:
    """Parse the texts of `--set` and `--lora-modules`, and validate the profile's file before slow work begins."""
    if values["profile"] not in ("auto", "off", ""):
        read_profile(Path(values["profile"]))
    texts = values["recipe_params"] or ()
    params = read_assignments([find(values["recipe"])], texts, "set")
    return values | {"recipe_params": params, "lora_modules": adapters_of(values["lora_modules"] or ())}


def adapters_of(texts: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        if not equals:
            raise ConfigError(f"lora_modules must be NAME=FOLDER, got {text!r}")
        if name in found:
            raise ConfigError(f"lora_modules: {name} is given twice")
        found[name] = _at_home(folder)
    return found
