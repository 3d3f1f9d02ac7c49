"""Reject the words of tools/words.txt in code, tests, tools, benchmarks and documents.

    python tools/check_words.py

Prints each finding as file:line: word -> replacement.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = ("*.md", "Makefile", "{src,tests,tools,benchmarks}/**/*.py", "{docs,benchmarks}/**/*.md")
# These files define or test the list, or have texts of the built-in model.
EXEMPT = ("tools/words.txt", "tools/check_words.py", "tests/test_words.py", "tools/builtin_tasks.py")


class WordList:
    """Rejected words and their replacements.

    Args:
        text: One `PATTERN -> REPLACEMENT` a line; blank lines and lines that begin with # are ignored.
        folder: Adds the lines that begin with it and a colon.
    """

    def __init__(self, text: str, folder: str = "") -> None:
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
        found = [re.fullmatch(r"(?:([a-z]+): )?(.+) -> (.+)", line) for line in lines]
        pairs = [(match[2], match[3]) for match in found if match is not None and match[1] in (None, folder)]
        self._replacements = {_whole(pattern): replacement for pattern, replacement in pairs}
        self._any = _whole("|".join(pattern for pattern, _ in pairs))

    def findings(self, text: str) -> Iterator[tuple[int, str, str]]:
        """Yield the line number, the word and its replacement for each rejected word of a text."""
        for match in self._any.finditer(text):
            whole = next(one for one in self._replacements if one.match(text, match.start()))
            yield text.count("\n", 0, match.start()) + 1, match.group(), self._replacements[whole]


def _whole(pattern: str) -> re.Pattern[str]:
    # Identifiers are matched in parts, so that the boundary is any character but a letter.
    return re.compile(rf"(?<![A-Za-z])(?:{pattern})(?![A-Za-z])", re.IGNORECASE | re.MULTILINE)


def files(root: Path) -> Iterator[Path]:
    """Yield the files to check, without those of folders that git ignores."""
    for pattern in FILES:
        head, _, tail = pattern.rpartition("}")
        for folder in head.strip("{").split(","):
            for file in sorted(root.glob(f"{folder}{tail}")):
                if file.relative_to(root).as_posix() not in EXEMPT:
                    yield file


def main() -> int | str:
    text, found = (ROOT / "tools/words.txt").read_text(encoding="utf-8"), 0
    lists = {folder: WordList(text, folder) for folder in ("", "src")}
    for file in files(ROOT):
        words = lists.get(file.relative_to(ROOT).parts[0], lists[""])
        for number, word, replacement in words.findings(file.read_text(encoding="utf-8")):
            print(f"{file.relative_to(ROOT)}:{number}: {word} -> {replacement}")
            found += 1
    return f"{found} words to replace" if found else 0


if __name__ == "__main__":
    sys.exit(main())
