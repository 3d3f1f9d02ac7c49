"""Conversations with tools that the built-in model is trained and measured on.

A question that fits a function is answered by a call, and the result of a call by its text. Functions and parameters
have several names, of which the model uses those that are offered.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from builtin_tasks import UNKNOWN_ANSWER, WORDS, Task, draw_task, draw_word, phrase

Message = dict[str, object]


class Function(NamedTuple):
    name: str
    parameters: tuple[str, ...]

    @property
    def tool(self) -> dict[str, object]:
        """The function in OpenAI's form."""
        properties: dict[str, object] = {name: {} for name in self.parameters}
        parameters = {"type": "object", "properties": properties}
        return {"type": "function", "function": {"name": self.name, "parameters": parameters}}


@dataclass(frozen=True)
class Turn:
    """Conversation with functions, and its only correct answer."""

    functions: tuple[Function, ...]
    messages: list[Message]
    answer: str


class _Kind(NamedTuple):
    """Questions that one function fits, with the names that it may have."""

    names: tuple[str, ...]
    parameters: tuple[tuple[str, ...], ...]
    wordings: tuple[str, ...]


_PAIRS = (("a", "b"), ("a", "b"), ("x", "y"), ("m", "n"), ("first", "second"), ("left", "right"), ("number", "other"))
_PLACES = (("city",), ("city",), ("location",), ("place",), ("town",))
_KINDS = {
    "add": _Kind(
        ("add", "add", "add_numbers", "sum", "plus"),
        _PAIRS,
        (
            "what is {a} plus {b}",
            "what's {a} plus {b}",
            "how much is {a} plus {b}",
            "{a} plus {b}",
            "add {a} and {b}",
            "what is {a} + {b}",
        ),
    ),
    "subtract": _Kind(
        ("subtract", "subtract", "subtract_numbers", "minus"),
        _PAIRS,
        (
            "what is {a} minus {b}",
            "what's {a} minus {b}",
            "how much is {a} minus {b}",
            "{a} minus {b}",
            "what is {a} - {b}",
        ),
    ),
    "multiply": _Kind(
        ("multiply", "multiply", "multiply_numbers", "product", "times"),
        _PAIRS,
        (
            "what is {a} times {b}",
            "what's {a} times {b}",
            "how much is {a} times {b}",
            "{a} times {b}",
            "multiply {a} by {b}",
            "what is {a} * {b}",
        ),
    ),
    "weather": _Kind(
        ("weather", "get_weather", "get_current_weather", "weather_in"),
        _PLACES,
        (
            "what is the weather in {w}",
            "what's the weather in {w}",
            "how is the weather in {w}",
            "what is the weather like in {w}",
            "tell me the weather in {w}",
        ),
    ),
    "time": _Kind(
        ("time", "get_time", "current_time", "time_in"),
        _PLACES,
        ("what is the time in {w}", "what's the time in {w}", "what time is it in {w}", "tell me the time in {w}"),
    ),
}
_OF_NUMBERS = ("add", "subtract", "multiply")
_OTHERS = (
    Function("search", ("query",)),
    Function("now", ()),
    Function("send_mail", ("to", "subject")),
    Function("open", ("file",)),
    Function("set_alarm", ("hour", "minute")),
)
CITIES = (
    "Amsterdam", "Athens", "Bangkok", "Beijing", "Berlin", "Bern", "Bogota", "Boston", "Brussels", "Budapest",
    "Cairo", "Chicago", "Copenhagen", "Dakar", "Delhi", "Dublin", "Geneva", "Hamburg", "Hanoi", "Helsinki",
    "Istanbul", "Jakarta", "Kyoto", "Lagos", "Lima", "Lisbon", "London", "Madrid", "Manila", "Melbourne",
    "Mexico City", "Miami", "Milan", "Montreal", "Mumbai", "Munich", "Nairobi", "New York", "Osaka", "Oslo", "Paris",
    "Prague", "Quito", "Riga", "Rome", "San Francisco", "Santiago", "Seattle", "Seoul", "Stockholm", "Sydney",
    "Tokyo", "Toronto", "Tunis", "Vienna", "Warsaw", "Zurich",
)  # fmt: skip
_MAX_ANSWER = 120  # characters in words
_SKIES = ("rain", "snow", "sun", "wind", "fog", "clouds", "light rain", "clear sky", "storm", "sunny", "cloudy")
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You are Tally.", "Answer briefly.", "Follow the instruction.")


def call(rng: random.Random, *, held_out: bool = False) -> Turn:
    """Return a question that one of the functions fits, in some cases after another one."""
    task = _question(rng, held_out=held_out)
    fitting = {task.key[0]: _function(rng, task.key[0])}
    messages = _system(rng)
    if rng.random() < 0.05:
        before = _question(rng)
        text = _result(rng, before)
        function = fitting.setdefault(before.key[0], _function(rng, before.key[0]))
        messages += [*_called(before, function, text), {"role": "assistant", "content": text}]
    messages.append(_user(task))
    return Turn(_offered(rng, fitting), messages, _written(fitting[task.key[0]], task))


def result(rng: random.Random, *, held_out: bool = False) -> Turn:
    """Return a question with a call and its result, which the answer repeats."""
    task = _question(rng, held_out=held_out)
    function, text = _function(rng, task.key[0]), _result(rng, task)
    # As with `tool_choice` none.
    functions = () if rng.random() < 0.1 else _offered(rng, {task.key[0]: function})
    return Turn(functions, [*_system(rng), *_called(task, function, text)], text)


def in_words(rng: random.Random, *, held_out: bool = False) -> Turn:
    """Return a task that no function fits."""
    if rng.random() < 0.5:
        while len((task := draw_task(rng, held_out=held_out)).answer) > _MAX_ANSWER:
            pass
        return Turn(_offered(rng, {}), [*_system(rng), _user(task)], task.answer)
    task = _question(rng, held_out=held_out)
    functions = () if rng.random() < 0.2 else _offered(rng, {}, without=task.key[0])
    return Turn(functions, [*_system(rng), _user(task)], UNKNOWN_ANSWER)


# Generator and share by name.
TURNS: dict[str, tuple[Callable[..., Turn], float]] = {
    "tool call": (call, 0.55),
    "tool result": (result, 0.25),
    "no tool fits": (in_words, 0.2),
}


def draw_turn(rng: random.Random, name: str | None = None, *, held_out: bool = False) -> Turn:
    """Return a turn of a name, or of a random one by share, from the training or the held-out part."""
    name = name or rng.choices(list(TURNS), [share for _, share in TURNS.values()])[0]
    return TURNS[name][0](rng, held_out=held_out)


def _question(rng: random.Random, *, held_out: bool = False) -> Task:
    """Return a question, whose key has its kind and the arguments of a call; its answer depends on the functions."""
    while True:
        kind = rng.choice(list(_KINDS))
        values: dict[str, object] = {"w": _place(rng)}
        if kind in _OF_NUMBERS:
            values = {"a": _number(rng), "b": _number(rng)}
        task = Task((kind, *values.values()), phrase(rng, _KINDS[kind].wordings, **values), "")
        if task.held_out == held_out:
            return task


def _number(rng: random.Random) -> int:
    return rng.randint(0, 200) if rng.random() < 0.95 else rng.randint(201, 999)


def _place(rng: random.Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.75 else draw_word(rng).capitalize()


def _function(rng: random.Random, kind: object) -> Function:
    """Return a function that fits a kind of questions."""
    found = _KINDS[str(kind)]
    return Function(rng.choice(found.names), rng.choice(found.parameters))


def _offered(rng: random.Random, fitting: dict[object, Function], without: object = None) -> tuple[Function, ...]:
    """Return the functions of some kinds, and in most cases others, of no such kind and not of kind `without`."""
    count = rng.choice((0, 0, 0, 1, 2)) if fitting else rng.choice((1, 1, 2))
    kinds = rng.sample([kind for kind in _KINDS if kind not in fitting and kind != without], count)
    others = [_function(rng, kind) if rng.random() < 0.6 else rng.choice(_OTHERS) for kind in kinds]
    found = list(dict.fromkeys([*others, *fitting.values()]))
    rng.shuffle(found)
    return tuple(found)


def _result(rng: random.Random, task: Task) -> str:
    draw = rng.random()
    if task.key[0] in _OF_NUMBERS and draw < 0.7:
        return str(rng.randint(0, 299) if rng.random() < 0.7 else rng.randint(300, 999))
    if draw < 0.6:
        sky, degrees = rng.choice(_SKIES), rng.randint(0, 40)
        sky = sky.capitalize() if rng.random() < 0.7 else sky
        return rng.choice((f"{sky}, {degrees} degrees.", f"{sky}, {degrees} degrees", f"{degrees} degrees, {sky}", sky))
    if draw < 0.75:
        return f"{rng.randint(0, 23)}:{rng.randint(10, 59)}"
    if draw < 0.9:
        return json.dumps({"result": rng.randint(0, 299)})
    return " ".join(rng.sample(WORDS, rng.randint(1, 2)))


def _called(task: Task, function: Function, text: str) -> list[Message]:
    """Return a question, a call and its result."""
    made = {"type": "function", "function": {"name": function.name, "arguments": _arguments(function, task)}}
    calling: Message = {"role": "assistant", "content": None, "tool_calls": [made]}
    return [_user(task), calling, {"role": "tool", "content": text}]


def _written(function: Function, task: Task) -> str:
    """Return a call as the chat template and the grammar of enforced calls write it."""
    return json.dumps({"name": function.name, "parameters": _arguments(function, task)})


def _arguments(function: Function, task: Task) -> dict[str, object]:
    return dict(zip(function.parameters, task.key[1:], strict=True))


def _user(task: Task) -> Message:
    return {"role": "user", "content": task.prompt}


def _system(rng: random.Random) -> list[Message]:
    return [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < 0.1 else []
