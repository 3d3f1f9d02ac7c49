from __future__ import annotations

import re

# Characters of an error, which may quote the grammar, and of a pattern in it.
_MAX_REASON = 400
_MAX_PATTERN = 80
# What the compiler calls places between characters.
_PLACES = {
    "Start": "^ that is not at its beginning",
    "End": "$ that is not at its end",
    "WordUnicode": r"\b",
    "WordUnicodeNegate": r"\B",
}
# Patterns of the compiler's errors, and what they mean.
_MEANINGS = (
    (r"NoExtensionBias.*", "its parts exclude each other, so no text is allowed: relax one of them"),
    (
        r"oneOf constraints are not supported.*",
        'the keyword "oneOf": its alternatives must exclude each other by types or by a required property with '
        "different constants; use anyOf",
    ),
    (
        r"min/maxProperties only supported when all keys listed in \"properties\" are required",
        'the keywords "minProperties" and "maxProperties" with named properties that are not required: name these in '
        "required, or remove the bounds",
    ),
    (
        r"patternProperty regexes (.*) and (.*) are not disjoint",
        r'the keyword "patternProperties": the patterns \1 and \2 must exclude each other',
    ),
    (
        r"Resource '(?:json-schema:///)?(.*?)' is not present in a registry and retrieving it failed: .*",
        r'the reference to "\1" leaves the schema, and Skipjoin does not fetch resources: put it in $defs',
    ),
    (r"Anchor '(.*?)' does not exist", r'the reference to "#\1" has no target in the schema'),
    (r"Pointer '(.*?)' does not exist", r'the reference to "#\1" has no target in the schema'),
    (r"Unimplemented keys: \[(.*)\]", r"the keyword \1: no grammar expresses it; remove it"),
    (r"Unknown format: (.*)", r'the format "\1" is unknown: remove it, or use pattern'),
    (r"Unsatisfiable schema: Regex is empty.*", "no text has its pattern, format and lengths at once"),
    (r"Unsatisfiable schema: (incompatible types)", "no value has all of its types, constants and keywords"),
    (r"Unsatisfiable schema: (schema is false|anyOf is empty|No options in anyOf)", "it allows no value"),
    (r"Unsatisfiable schema: (.*)", r"no value satisfies it, because \1"),
    (r"Failed to generate regex for (\w+) range: .*", r"a bound of \1 numbers is too large"),
    (r"Expected (\w+) for '(\w+)', got (.*)", r"\2 must be of type \1, got \3"),
)


_PLACE = re.compile(r"lookarounds not supported yet; (\w+) in regex /(.*)/", re.DOTALL)


def shown(pattern: str) -> str:
    return f"/{pattern if len(pattern) <= _MAX_PATTERN else pattern[:_MAX_PATTERN] + '...'}/"


def reason(error: str, impossible: list[str] | None = None) -> str:
    # The compiler quotes the lines of the grammar around an error.
    text = " ".join(re.sub(r"\n\s*\d+ \| .*", "", error.removesuffix("<non-verbose/>"), flags=re.DOTALL).split())
    text = re.sub(r"^at \d+\(\d+\): failed to compile JSON schema: ", "", text)
    if impossible and re.match("Unsatisfiable|NoExtensionBias", text):
        text = "; ".join(impossible)
    elif place := _PLACE.search(text):
        name, pattern = place.groups()
        text = f"the pattern {shown(pattern)} has {_PLACES.get(name, 'a look-around')}, which no grammar expresses"
    else:
        for pattern, meaning in _MEANINGS:
            if found := re.search(pattern, text):
                text = found.expand(meaning)
                break
    return f"cannot be enforced: {text[:_MAX_REASON]}"
