from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SIZE = 60
# Number of tokens of the longest prompt, which consists of token ids, and of the longest output.
LONGEST_PROMPT, LONGEST_OUTPUT = 240, 140
# Tokens of single bytes and numbers, which lie below the special ones.
_IDS = range(32, 500)


class Entry(NamedTuple):
    path: str
    body: dict[str, Any]

    @property
    def choices(self) -> int:
        return int(self.body.get("n", 1))

    @property
    def max_tokens(self) -> int:
        """Maximum number of output tokens over all choices."""
        return self.choices * int(self.body["max_tokens"])


def entry(number: int) -> Entry:
    draw = random.Random(f"catalog/{number}")
    path = (CHAT, COMPLETIONS)[number % 2]
    body = {"max_tokens": draw.randint(4, LONGEST_OUTPUT), **_prompt(path, draw), **_sampling(draw)}
    if draw.random() < 0.3:
        body["n"] = draw.choice((2, 3))
    if draw.random() < 0.3:
        body["stop"] = draw.sample(("7", "21", "e", "ten"), 2)
    elif draw.random() < 0.5:
        body["ignore_eos"] = True
    if draw.random() < 0.15:
        body["logprobs"] = True if path == CHAT else 1
    return Entry(path, body)


def numbers(path: str) -> Sequence[int]:
    return [number for number in range(SIZE) if entry(number).path == path]


def _prompt(path: str, draw: random.Random) -> dict[str, Any]:
    if path == COMPLETIONS and draw.random() < 0.4:
        return {"prompt": draw.choices(_IDS, k=draw.randint(60, LONGEST_PROMPT))}
    first = draw.randint(1, 30)
    task = draw.choice(
        (
            f"Count from {first} to {first + draw.randint(3, 60)}",
            f"Count down from {first + 40} to {first}",
            f"Repeat the word tree {draw.randint(2, 20)} times",
            "Spell apple",
        )
    )
    return {"prompt": f"{task}\n"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": task}]}


def _sampling(draw: random.Random) -> dict[str, Any]:
    if draw.random() < 0.5:
        return {"temperature": 0}
    return {"temperature": draw.choice((0.7, 1.0, 1.3)), "seed": draw.randint(0, 999), "top_p": draw.choice((1, 0.9))}
