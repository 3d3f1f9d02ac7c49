from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    return import_module("check_words").WordList((TOOLS / "words.txt").read_text(encoding="utf-8"), "src")


@pytest.mark.parametrize(
    "text",
    [
        "A request who waits",
        "def test_nobody_notices():",
        "max_bytes = most_bytes",
        "class Foreseen:",
        "colour=BLUE",
        "It normalises the logits.",
        "its blocks come home",
        "until the move lifts its fence",
        "the hosting request",
        "twin_of(request)",
        "for one in requests:",
    ],
)
def test_rejected_words_are_found_in_prose_and_identifiers(words: Any, text: str) -> None:
    assert [number for number, *_ in words.findings(f"\n{text}")] == [2]


@pytest.mark.parametrize(
    "text",
    [
        "whole blocks",
        "most common",
        "Counter.most_common",
        "least_squares",
        "the seatbelt",
        "optimism",
        "color",
        "regained",
        "between",
        "a wait for one in flight",
    ],
)
def test_similar_words_are_accepted(words: Any, text: str) -> None:
    assert not list(words.findings(text))


def test_a_finding_has_its_replacement(words: Any) -> None:
    assert list(words.findings("learnt")) == [(1, "learnt", "learned")]
