from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Kind = Literal["json", "regex", "choice", "grammar"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# Maximum bytes of a grammar. Larger ones take longer to compile than `model.grammar_program` allows.
MAX_GRAMMAR_BYTES = 64 << 10
MAX_CHOICES = 1024
# Maximum tokens that end the unconstrained part of an output.
MAX_AFTER_TOKENS = 16
_FIELDS = (*KINDS, "json_object", "whitespace_pattern")
# Fields of vLLM's that ask for what is so here: no white space by itself, and no other backend.
_AS_IT_IS = ("disable_any_whitespace", "disable_fallback")
# Regular expressions of nothing but white space.
_WHITESPACE = re.compile(r"(?:[ \t\n\r?*+|()]|\\[nrts]|\(\?:|\{\d+(?:,\d*)?\}|\[(?:[ \t\n\r]|\\[nrts])+\])*")


class GrammarError(ValueError):
    """Invalid constraint. The text starts after the name of the field, for example "must be ..."."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """Constraint on an output, which the engine enforces token by token.

    Attributes:
        kind: Notation of `text`: a JSON schema, a regular expression, a JSON list of strings to choose from, or a
            grammar in llguidance's variant of Lark.
        whitespace: Regular expression of the white space between the tokens of a JSON text; None for none.
        after: Tokens of the output after which the constraint begins, for example the end of the reasoning.

    Raises:
        GrammarError: If a value is outside its bounds. The grammar itself is checked when it is compiled.

    Example:
    >>> StructuredOutput.choice(["yes", "no"])
    StructuredOutput(kind='choice', text='["yes","no"]', whitespace=None, after=())
    """

    kind: Kind
    text: str
    whitespace: str | None = None
    after: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise GrammarError(f"must have one of the kinds {', '.join(KINDS)}, got {self.kind!r}")
        for text in (self.text, self.whitespace):
            if text is not None and (size := _size_of(text)) > MAX_GRAMMAR_BYTES:
                raise GrammarError(f"must have at most {MAX_GRAMMAR_BYTES} bytes, got {size}")
        if not self.text:
            raise GrammarError("must not be empty")
        if self.whitespace is not None and not _WHITESPACE.fullmatch(self.whitespace):
            raise GrammarError(
                'whitespace_pattern must allow nothing but white space of JSON, for example "[ \\n\\t]*"'
            )
        object.__setattr__(self, "whitespace", self.whitespace and _of_json(self.whitespace))
        if len(self.after) > MAX_AFTER_TOKENS:
            raise GrammarError(f"must begin after at most {MAX_AFTER_TOKENS} tokens, got {len(self.after)}")

    @classmethod
    def json(cls, schema: Mapping[str, Any] | str | bool, whitespace: str | None = None) -> StructuredOutput:
        text = schema if isinstance(schema, str) else _as_json(schema)
        return cls(kind="json", text=text, whitespace=whitespace)

    @classmethod
    def json_object(cls, whitespace: str | None = None) -> StructuredOutput:
        return cls.json({"type": "object"}, whitespace)

    @classmethod
    def choice(cls, choices: list[str] | tuple[str, ...]) -> StructuredOutput:
        if not isinstance(choices, list | tuple) or not all(isinstance(choice, str) and choice for choice in choices):
            raise GrammarError("choice must be a list of non-empty strings")
        if not 1 <= len(choices) <= MAX_CHOICES:
            raise GrammarError(f"choice must have 1 to {MAX_CHOICES} strings, got {len(choices)}")
        return cls(kind="choice", text=_as_json(list(choices)))

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> StructuredOutput:
        """Return the constraint in vLLM's notation: one of json, json_object, regex, choice and grammar."""
        values = {
            name: value
            for name, value in given.items()
            if value is not None and value is not False and not (name in _AS_IT_IS and value is True)
        }
        if given.get("disable_any_whitespace") is True and "whitespace_pattern" in values:
            raise GrammarError("whitespace_pattern must be null with disable_any_whitespace")
        if unknown := sorted(set(values) - set(_FIELDS)):
            raise GrammarError(f"has no field {unknown[0]}: fields are {', '.join(_FIELDS)}")
        whitespace = values.pop("whitespace_pattern", None)
        if len(values) != 1:
            raise GrammarError(f"must have exactly one of {', '.join(_FIELDS[:-1])}, got {len(values)}")
        ((name, value),) = values.items()
        if whitespace is not None and not (isinstance(whitespace, str) and name in ("json", "json_object")):
            raise GrammarError("whitespace_pattern must be a string, with json or json_object")
        if name == "json_object":
            return cls.json_object(whitespace)
        if name == "json":
            return cls.json(value, whitespace)
        if name == "choice":
            return cls.choice(value)
        if not isinstance(value, str):
            raise GrammarError(f"{name} must be a string, got {type(value).__name__}")
        return cls(kind="regex" if name == "regex" else "grammar", text=value)


def _of_json(whitespace: str) -> str:
    """Write out the class for any white space as the characters that JSON allows."""
    return re.sub(r"\[.+?\]|\\s", lambda part: f"[{part[0].strip('[]')}]".replace(r"\s", r" \t\n\r"), whitespace)


def _size_of(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise GrammarError("must be Unicode text, and half a surrogate pair is none") from None


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        problem = "its numbers must be of a size below 1.8e308" if "float" in str(error) else str(error)
        raise GrammarError(f"must be of JSON values: {problem}") from None
