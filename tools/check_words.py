"""Fail on words that describe requests, ranks and processes as persons, in the package and the documents.

    python tools/check_words.py

The tool prints each line with such a word as file:line: text.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

WORDS = re.compile(r"\b(who|whom|whoever|somebody|nobody|anybody|everybody)\b", re.IGNORECASE)
FILES = ("src/**/*.py", "docs/**/*.md", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
# Lines with one of these texts may contain the words, because they quote them or use them as data.
ALLOWED = ("tools/check_words.py",)


def findings(root: Path) -> list[str]:
    """Return the lines with a word, each with its file relative to `root` and its number."""
    return [
        f"{file.relative_to(root)}:{number}: {line.strip()}"
        for pattern in FILES
        for file in sorted(root.glob(pattern))
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if WORDS.search(line) and not any(text in line for text in ALLOWED)
    ]


if __name__ == "__main__":
    lines = findings(Path(__file__).parents[1])
    print(*lines, sep="\n")
    sys.exit(f"{len(lines)} lines speak of a person; name the thing: a request, a rank, a process" if lines else 0)
