from __future__ import annotations

from skipjoin.options import ConfigError


def names_in(text: str) -> list[str]:
    """Split a list of recipes at the commas outside brackets. Raise `ConfigError` if a bracket has no partner."""
    names, depth = [""], 0
    for char in text:
        depth += (char == "[") - (char == "]")
        if depth < 0:
            break
        if char == "," and not depth:
            names.append("")
        else:
            names[-1] += char
    if depth:
        lacks = "closed by ]" if depth > 0 else "opened by ["
        raise ConfigError(f"recipes: a bracket is not {lacks} in {names[-1].strip()!r}: write NAME[PARAMETER=VALUE]")
    return [name.strip() for name in names]


def split(name: str) -> tuple[str, list[str]]:
    """Return the recipe without its brackets, and the texts of its parameters.

    A comma separates parameters only where another one follows, because values may contain commas.
    """
    base, bracket, inside = name.strip().rpartition("[")
    if not bracket or ("]" in inside and not inside.endswith("]")):  # brackets inside a path
        return name.strip(), []
    if not inside.endswith("]"):
        raise ConfigError(f"recipe: a bracket is not closed by ] in {name!r}: write NAME[PARAMETER=VALUE]")
    texts: list[str] = []
    for part in inside.removesuffix("]").split(","):
        if not part.strip():
            raise ConfigError(f"recipe: a parameter is missing in {name!r}: write NAME[PARAMETER=VALUE,...] or {base}")
        if texts and "=" not in part:
            texts[-1] += f",{part}"
        else:
            texts.append(part)
    return base.strip(), texts
