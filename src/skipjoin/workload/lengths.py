"""Lengths of requests: prompt and output tokens, drawn from a joint distribution."""

from __future__ import annotations

import json
import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise
from statistics import fmean
from typing import Any, Protocol

from skipjoin.config import ConfigError, unknown
from skipjoin.workload.fields import number
from skipjoin.workload.traces import Trace, read_trace

# Each is a file in tables/, made by tools/make_length_tables.py.
BUILT_IN = ("alpaca", "bookcorpus", "lmsys", "sharegpt")
FORMS = (*BUILT_IN, "uniform", "fixed", "trace:FILE")


class Lengths(Protocol):
    """A joint distribution of prompt and output tokens, both at least 1."""

    @property
    def name(self) -> str:
        """The text that `parse_lengths` maps to this distribution."""
        ...

    def draw(self, random: random.Random) -> tuple[int, int]:
        """Prompt tokens and output tokens of one request. Always takes two numbers from `random`."""
        ...

    def mean(self) -> tuple[float, float]:
        """Expected prompt tokens and output tokens."""
        ...


@dataclass(frozen=True)
class Uniform:
    """Prompt and output tokens, each uniform over its own range, both ends included."""

    name: str
    prompt: tuple[int, int]
    output: tuple[int, int]

    def draw(self, random: random.Random) -> tuple[int, int]:
        return _pick(self.prompt, random.random()), _pick(self.output, random.random())

    def mean(self) -> tuple[float, float]:
        return sum(self.prompt) / 2, sum(self.output) / 2

    def scaled(self, name: str, prompt: float, output: float) -> Uniform:
        """A renamed copy, with the ends of the ranges times a factor, rounded and at least 1."""
        return Uniform(name, _scaled_range(self.prompt, prompt), _scaled_range(self.output, output))


def _pick(ends: tuple[int, int], level: float) -> int:
    return ends[0] + int(level * (ends[1] - ends[0] + 1))


def _scaled_range(ends: tuple[int, int], factor: float) -> tuple[int, int]:
    return _scaled(ends[0], factor), _scaled(ends[1], factor)


def _scaled(tokens: int, factor: float) -> int:
    return max(1, _whole(tokens * factor))


def _whole(tokens: float) -> int:
    # Halves round up: round() rounds them to even.
    return math.floor(tokens + 0.5)


@dataclass(frozen=True)
class PromptBin:
    """Requests of adjacent prompt lengths.

    upto: the share of all requests whose prompts are in this bin or below. prompt: prompt tokens at equally spaced
    levels of the bin, its ends included. output: output tokens of these requests at the table's output levels.
    """

    upto: float
    prompt: tuple[int, ...]
    output: tuple[int, ...]


@dataclass(frozen=True)
class QuantileTable:
    """A measured joint distribution, as prompt quantiles and output quantiles given the prompt.

    Drawn by inverse transform: one level selects the bin and the position in it, another the output. Quantiles are
    interpolated linearly; within a bin the output does not depend on the prompt.
    """

    name: str
    output_levels: tuple[float, ...]
    bins: tuple[PromptBin, ...]
    edges: tuple[float, ...]

    @classmethod
    def load(cls, name: str) -> QuantileTable:
        """The built-in table of this name."""
        return cls.of(name, read_table(name))

    @classmethod
    def of(cls, name: str, table: dict[str, Any]) -> QuantileTable:
        """A table from the contents of its JSON file."""
        bins = tuple(PromptBin(row["upto"], tuple(row["prompt"]), tuple(row["output"])) for row in table["bins"])
        return cls(name, tuple(table["output_levels"]), bins, (0.0, *(row.upto for row in bins)))

    def draw(self, random: random.Random) -> tuple[int, int]:
        level = random.random()
        index = bisect_right(self.edges, level) - 1
        row = self.bins[index]
        low, high = self.edges[index], self.edges[index + 1]
        place = (level - low) / (high - low) * (len(row.prompt) - 1)
        knot = min(int(place), len(row.prompt) - 2)
        prompt = _between(row.prompt, knot, place - knot)
        level = random.random()
        knot = bisect_right(self.output_levels, level) - 1
        low, high = self.output_levels[knot], self.output_levels[knot + 1]
        output = _between(row.output, knot, (level - low) / (high - low))
        return _whole(prompt), _whole(output)

    def mean(self) -> tuple[float, float]:
        masses = [high - low for low, high in pairwise(self.edges)]
        widths = [high - low for low, high in pairwise(self.output_levels)]
        rows = list(zip(masses, self.bins, strict=True))
        even = [1 / (len(self.bins[0].prompt) - 1)] * (len(self.bins[0].prompt) - 1)
        return (
            sum(mass * _area(even, row.prompt) for mass, row in rows),
            sum(mass * _area(widths, row.output) for mass, row in rows),
        )

    def scaled(self, name: str, prompt: float, output: float) -> QuantileTable:
        """A renamed copy, with all quantiles times a factor, rounded and at least 1."""
        bins = tuple(
            PromptBin(
                row.upto,
                tuple(_scaled(tokens, prompt) for tokens in row.prompt),
                tuple(_scaled(tokens, output) for tokens in row.output),
            )
            for row in self.bins
        )
        return QuantileTable(name, self.output_levels, bins, self.edges)


@dataclass(frozen=True)
class TraceLengths:
    """The rows of a trace, each as likely as the others. prompt, output: factors of their tokens."""

    name: str
    trace: Trace
    prompt: float = 1.0
    output: float = 1.0

    def draw(self, random: random.Random) -> tuple[int, int]:
        row = self.trace.rows[int(random.random() * len(self.trace.rows))]
        random.random()  # every distribution takes two numbers
        return _scaled(row.prompt_tokens, self.prompt), _scaled(row.output_tokens, self.output)

    def mean(self) -> tuple[float, float]:
        rows = self.trace.rows
        return (
            fmean(_scaled(row.prompt_tokens, self.prompt) for row in rows),
            fmean(_scaled(row.output_tokens, self.output) for row in rows),
        )

    def scaled(self, name: str, prompt: float, output: float) -> TraceLengths:
        """A renamed copy, with the tokens of rows times a factor, rounded and at least 1."""
        return TraceLengths(name, self.trace, prompt, output)


def _between(knots: Sequence[int], index: int, share: float) -> float:
    return knots[index] + share * (knots[index + 1] - knots[index])


def _area(widths: Sequence[float], knots: Sequence[int]) -> float:
    return sum(width * (low + high) / 2 for width, (low, high) in zip(widths, pairwise(knots), strict=True))


@cache
def read_table(name: str) -> dict[str, Any]:
    """The JSON object of a built-in table: quantiles, source, licence and the reference figures."""
    text = files("skipjoin.workload").joinpath("tables", f"{name}.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def parse_lengths(text: str) -> Lengths:
    """Lengths by name: a built-in table (`sharegpt`), `uniform:64-128,16-32` or `fixed:128,64` (prompt, output), or
    rows of a file at random, as in `trace:requests.csv`, whose arrival times and texts are not used.

    `*0.25` at the end scales prompt and output; `*0.25,0.5` scales each on its own. No length falls below 1.
    Raises `ConfigError`.
    """
    name = text.strip()
    base, star, factors = name.partition("*")
    lengths = _parse_base(name if not star else base.strip())
    if not star:
        return lengths
    parts = factors.split(",")
    if len(parts) > 2:
        raise ConfigError(f"lengths: * must be followed by one or two factors, got {factors!r}")
    prompt, output = (number("lengths: the factor after *", part, most=1e6) for part in (parts[0], parts[-1]))
    return lengths.scaled(f"{lengths.name}*{factors}", prompt, output)


def _parse_base(name: str) -> Uniform | QuantileTable | TraceLengths:
    form, colon, rest = name.partition(":")
    if form == "trace" and rest:
        trace = read_trace(rest, hash_tokens=None)
        return TraceLengths(f"trace:{trace.name}", trace)  # without the folder, as in the records of a replay
    if form in BUILT_IN and not colon:
        return QuantileTable.load(form)
    if form not in ("uniform", "fixed"):
        raise unknown("lengths", name, sorted(FORMS))
    parts = rest.split(",")
    if len(parts) != 2:
        example = "uniform:64-128,16-32" if form == "uniform" else "fixed:128,64"
        raise ConfigError(f"lengths: {form} takes prompt and output tokens, as in {example}, got {name!r}")
    read = _range if form == "uniform" else _single
    return Uniform(name, read("prompt", parts[0]), read("output", parts[1]))


def _range(which: str, text: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    if not dash:
        raise ConfigError(f"lengths: the {which} range must be LOW-HIGH, got {text.strip()!r}")
    ends = _tokens(which, low), _tokens(which, high)
    if ends[0] > ends[1]:
        raise ConfigError(f"lengths: the {which} range must not end below its start, got {text.strip()!r}")
    return ends


def _single(which: str, text: str) -> tuple[int, int]:
    tokens = _tokens(which, text)
    return tokens, tokens


def _tokens(which: str, text: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) >= 1):
        raise ConfigError(f"lengths: {which} tokens must be an integer in [1, 999999999], got {text!r}")
    return int(text)
