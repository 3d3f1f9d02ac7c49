"""Tool calls that the built-in model is trained and measured on: its tasks, as calls of functions that fit them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from builtin_tasks import Task, draw_task

# Names of functions and of their parameters, by family. A call has the task's arguments in this order.
_FUNCTIONS: dict[str, tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]] = {
    "count": (
        ("count", "count_up", "count_numbers"),
        (("first", "last"), ("start", "end"), ("from", "to"), ("a", "b")),
    ),
    "count down": (("count_down", "countdown"), (("first", "last"), ("start", "end"), ("from", "to"), ("a", "b"))),
    "even numbers": (("even_numbers", "even"), (("first", "last"), ("start", "end"), ("from", "to"), ("a", "b"))),
    "spell": (("spell", "spell_word"), (("word",), ("text",))),
    "repeat": (("repeat", "repeat_word"), (("word", "times"), ("text", "times"), ("word", "n"))),
    "reverse": (("reverse", "reverse_list"), (("numbers",), ("list",))),
}
_OTHERS = ("weather(city)", "search(query)", "now()", "send_mail(to, subject)", "get_time(zone)", "open(file)")
# Families that no function fits are answered in words, and so are tasks without a function that fits.
_IN_WORDS = ("small talk", "alphabet", "unknown")
_UNFITTING, _ANSWERED = 0.2, 0.15
_MAX_RESULT_CHARS = 60


@dataclass(frozen=True)
class Turn:
    """Message after a list of functions.

    Attributes:
        functions: Offered functions, as in `count(first, last)`.
        call: Call of an earlier message, and its result. Empty: the task is the last message.
        answer: The only correct answer.
    """

    functions: tuple[str, ...]
    prompt: str
    call: str
    result: str
    answer: str


def draw_turn(rng: random.Random, *, held_out: bool = False) -> Turn:
    """Return a turn of the training or the held-out part."""
    others = rng.sample(_OTHERS, rng.randint(0, 2))
    draw = rng.random()
    if draw < _UNFITTING:
        task = draw_task(rng, rng.choice([*_IN_WORDS, *_FUNCTIONS]), held_out=held_out)
        return Turn(tuple(others or _OTHERS[:1]), task.prompt, "", "", task.answer)
    family = rng.choice(list(_FUNCTIONS))
    task = draw_task(rng, family, held_out=held_out)
    names, parameters = _FUNCTIONS[family]
    name, chosen = rng.choice(names), rng.choice(parameters)
    functions = [*others, *_others_of(rng, family), f"{name}({', '.join(chosen)})"]
    rng.shuffle(functions)
    call = written_call(name, dict(zip(chosen, _arguments(task), strict=True)))
    if draw < _UNFITTING + _ANSWERED:
        result = draw_task(rng, rng.choice(["count", "spell", "reverse", "small talk"])).answer[:_MAX_RESULT_CHARS]
        return Turn(tuple(functions), task.prompt, call, result, result)
    return Turn(tuple(functions), task.prompt, "", "", call)


def written_call(name: str, arguments: dict[str, object]) -> str:
    """Return a call as the chat template and the grammar of enforced calls write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def as_tool(function: str) -> dict[str, object]:
    """Return a function as the chat template receives it."""
    name, _, rest = function.partition("(")
    properties: dict[str, object] = {one: {} for one in rest.rstrip(")").split(", ") if one}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def _others_of(rng: random.Random, family: str) -> list[str]:
    """Return functions that fit other tasks."""
    found = []
    for other in rng.sample([name for name in _FUNCTIONS if name != family], rng.randint(0, 2)):
        names, parameters = _FUNCTIONS[other]
        found.append(f"{rng.choice(names)}({', '.join(rng.choice(parameters))})")
    return found


def _arguments(task: Task) -> list[object]:
    family, *arguments = task.key
    if family == "reverse":
        return [arguments]
    return arguments[::-1] if family == "count down" else arguments
