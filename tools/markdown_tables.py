from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in line) + " |" for line in lines] + [
        ""
    ]


def codes(texts: Iterable[object]) -> str:
    return ", ".join(f"`{text}`" for text in texts)
