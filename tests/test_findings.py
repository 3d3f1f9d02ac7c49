"""Scripts of findings/ say what they state in the same form. They need a network, so tests do not run them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[1] / "findings").glob("*.sh"))
FIELDS = ["Finding", "Version", "Guess", "What happens", "Why it matters"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_finding_has_its_form(script: Path) -> None:
    text = script.read_text()
    comment = re.findall(r"^# ([A-Z][\w ]+): \S", text, re.MULTILINE)
    assert comment[: len(FIELDS)] == FIELDS
    assert "expect" in text
    installed = re.findall(r"^(?:node_)?packages (.*)$", text, re.MULTILINE)
    assert installed
    names = [name for line in installed for name in line.split() if name[0] != "-"]
    assert all(re.search(r"==|.@\d", name) for name in names)
