"""The instruction tasks that the built-in model is trained and measured on.

Every task is a prompt with one correct answer. A hash of the task's arguments (numbers, word or list) assigns it to the
training part or to the held-out part, so training never uses a held-out prompt.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

HELD_OUT_PERCENT = 10
MAX_NUMBER = 200  # largest number in a count
MAX_REPEATS = 30
# The documentation's examples are never trained on, so that they show generalization.
ALWAYS_HELD_OUT = {("count", 3, 12), ("add", 12, 30), ("weather", "Oslo")}


@dataclass(frozen=True)
class Task:
    """A prompt and its only correct answer; `key` has the arguments that decide whether it is held out."""

    key: tuple[object, ...]
    prompt: str
    answer: str

    @property
    def held_out(self) -> bool:
        """Whether the task is excluded from training."""
        if self.key in ALWAYS_HELD_OUT:
            return True
        digest = hashlib.sha256(repr(self.key).encode()).digest()
        return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


WORDS = """
able above apple arm back bag ball banana bath bear bed bell bird black blue boat body book bottle box boy bread
bring brown bus butter button cake camp candle car card cat chair cheese child city clean cloud coat coffee cold
cook corn count cow cup dance dark day desk dog door dream dress drum duck dust earth east egg engine eye face farm
fast field fire fish flag floor flower food forest fork fox friend frog fruit game garden gate girl glass goat gold
grass green hair hammer hand happy hat head heart hello hill home honey horse house ice idea iron jar juice jump key
kind king kite lake lamp complete leaf lemon letter light lion lunch machine map market milk mind money month moon
morning mouse music nail name neck nest night nose ocean oil onion orange oven page paint paper park path pen pencil
people pepper picture pig plane plant plate pocket potato queen rabbit rain red rice river road rock roof room root
rope rose salt sand school sea seed sheep ship shirt shoe silver sister sky snow soap song soup spoon spring square
star station stone storm street sugar summer sun table tail tea ten tiger time tomato tooth tower town train tree
truck turtle uncle valley village violin wall water wheel window winter wood word world yellow young zebra
""".split()  # noqa: SIM905 - as a list it would be several times as long

SMALL_TALK = {
    "hello": "Hello! How can I help you?",
    "hi": "Hello! How can I help you?",
    "hey": "Hello! How can I help you?",
    "good morning": "Good morning!",
    "good evening": "Good evening!",
    "good night": "Good night!",
    "goodbye": "Goodbye!",
    "bye": "Goodbye!",
    "thanks": "You are welcome.",
    "thank you": "You are welcome.",
    "how are you": "I am fine, thank you.",
    "who are you": "I am Tally, a very small model. I can count, spell, repeat and reverse.",
    "what are you": "I am Tally, a very small model. I can count, spell, repeat and reverse.",
    "what is your name": "My name is Tally.",
    "what can you do": "I can count, spell, repeat a word, reverse a list and write a multiplication table.",
    "help": "Ask me to count from 1 to 20, or to spell a word.",
    "yes": "Yes.",
    "no": "No.",
    "ok": "Good.",
    "say yes": "Yes",
    "say no": "No",
}
UNKNOWN_ANSWER = "I can count, spell, repeat and reverse, but I do not know that."
_UNKNOWN_WORDINGS = [
    "what is the capital of {w}",
    "tell me about the {w}",
    "tell me a story about a {w}",
    "why is the {w} so {v}",
    "write a poem about {w} and {v}",
    "where can I find a {w}",
    "how do I make a {w}",
    "the {w} and the {v}",
    "what do you think of {w}",
    "explain {w} to me",
    "translate {w}",
    "is a {w} like a {v}",
]


def phrase(rng: random.Random, wordings: Sequence[str], **args: object) -> str:
    """Return one wording with random politeness, capitalization and punctuation."""
    text = rng.choice(wordings).format(**args)
    draw = rng.random()
    if draw < 0.2:
        text = rng.choice(["please ", "please, "]) + text
    elif draw < 0.3:
        text = rng.choice(["can you ", "could you "]) + text
    if rng.random() < 0.6:
        text = text[0].upper() + text[1:]
    return text + rng.choice(["", "", "", ".", ".", "?", "!"])


def draw_word(rng: random.Random) -> str:
    """Return a common word, or a pronounceable one of up to 8 letters."""
    if rng.random() < 0.4:
        return rng.choice(WORDS)
    syllables = [
        rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") + (rng.choice("lmnrst") if rng.random() < 0.4 else "")
        for _ in range(rng.randint(1, 3))
    ]
    return "".join(syllables)[:8]


def _length(rng: random.Random, longest: int) -> int:
    """Return a length from 1 to `longest`, usually short: the hard part is the end of an answer, and short answers have
    more ends for their cost."""
    draw = rng.random()
    return rng.randint(1, min(longest, 8 if draw < 0.7 else 30 if draw < 0.88 else longest))


def _range(rng: random.Random, longest: int) -> tuple[int, int]:
    """Return the first and last number of an ascending range of up to `longest` steps."""
    steps = _length(rng, longest)
    first = rng.choice([0, 1, 1, rng.randint(0, MAX_NUMBER - 1), rng.randint(0, MAX_NUMBER - 1)])
    return first, min(MAX_NUMBER, first + steps)


def _joined(numbers: range | list[int]) -> str:
    return ", ".join(map(str, numbers))


def count(rng: random.Random) -> Task:
    """Return a task to count upwards."""
    a, b = _range(rng, MAX_NUMBER)
    wordings = ["count from {a} to {b}"] * 3 + [
        "count {a} to {b}",
        "count up from {a} to {b}",
        "list the numbers from {a} to {b}",
        "write the numbers from {a} to {b}",
    ]
    return Task(("count", a, b), phrase(rng, wordings, a=a, b=b), _joined(range(a, b + 1)))


def count_down(rng: random.Random) -> Task:
    """Return a task to count downwards."""
    a, b = _range(rng, 100)
    wordings = ["count down from {b} to {a}", "count from {b} down to {a}", "count backwards from {b} to {a}"]
    return Task(("count down", a, b), phrase(rng, wordings, a=a, b=b), _joined(range(b, a - 1, -1)))


def even(rng: random.Random) -> Task:
    a, b = _range(rng, 100)
    b = min(MAX_NUMBER, b + 2)
    a = min(a, b - 2)
    wordings = ["list the even numbers from {a} to {b}", "list the even numbers between {a} and {b}"]
    numbers = [number for number in range(a, b + 1) if number % 2 == 0]
    return Task(("even", a, b), phrase(rng, wordings, a=a, b=b), _joined(numbers))


def spell(rng: random.Random) -> Task:
    """Return a task to spell a word."""
    word = draw_word(rng)
    wordings = ["spell {w}", "spell the word {w}", "how do you spell {w}"]
    return Task(("spell", word), phrase(rng, wordings, w=word), "-".join(word))


def repeat(rng: random.Random) -> Task:
    word, times = draw_word(rng), _length(rng, MAX_REPEATS)
    wordings = ["repeat {w} {n} times", "repeat the word {w} {n} times", "say {w} {n} times"]
    answer = "\n".join(f"{number}. {word}" for number in range(1, times + 1))
    return Task(("repeat", word, times), phrase(rng, wordings, w=word, n=times), answer)


def table(rng: random.Random) -> Task:
    """Return a multiplication table; number, length and wording decide whether it is held out."""
    number, lines = rng.randint(1, 12), rng.choice([2, 3, 3, 4, 5, 6, 7, 8, 9, 10, 10, 11, 12])
    wordings = [
        "multiplication table of {n} up to {m}",
        "write the multiplication table of {n} up to {m}",
        "show the multiplication table of {n} up to {m}",
        "the {n} times table up to {m}",
    ]
    if lines == 10:
        wordings += ["multiplication table of {n}", "write the multiplication table of {n}", "the {n} times table"]
    chosen = rng.randrange(len(wordings))
    answer = "\n".join(f"{number} x {factor} = {number * factor}" for factor in range(1, lines + 1))
    return Task(("table", number, lines, chosen), phrase(rng, [wordings[chosen]], n=number, m=lines), answer)


def reverse(rng: random.Random) -> Task:
    numbers = rng.sample(range(100), rng.randint(2, 8))
    wordings = ["reverse {l}", "reverse the list {l}", "reverse this list: {l}"]
    return Task(("reverse", *numbers), phrase(rng, wordings, l=_joined(numbers)), _joined(numbers[::-1]))


def alphabet(rng: random.Random) -> Task:
    """Return a part of the alphabet; its ends and the wording decide whether it is held out."""
    low, high = sorted(rng.sample(range(26), 2))
    first, last = chr(ord("a") + low), chr(ord("a") + high)
    wordings = [
        "say the alphabet from {a} to {b}",
        "write the alphabet from {a} to {b}",
        "list the letters from {a} to {b}",
    ]
    chosen = rng.randrange(len(wordings))
    answer = ", ".join(chr(ord("a") + index) for index in range(low, high + 1))
    return Task(("alphabet", low, high, chosen), phrase(rng, [wordings[chosen]], a=first, b=last), answer)


def small_talk(rng: random.Random) -> Task:
    """Return a greeting or a question about the model; the exact text decides whether it is held out."""
    said = rng.choice(list(SMALL_TALK))
    prompt = said[0].upper() + said[1:] if rng.random() < 0.5 else said
    prompt += rng.choice(["", "", ".", "!", "?", " there", ", Tally", " Tally!"])
    return Task(("small talk", prompt), prompt, SMALL_TALK[said])


def unknown(rng: random.Random) -> Task:
    """Return a task that the model cannot do."""
    prompt = phrase(rng, _UNKNOWN_WORDINGS, w=draw_word(rng), v=draw_word(rng))
    return Task(("unknown", prompt.lower()), prompt, UNKNOWN_ANSWER)


# Generator and training weight by name.
FAMILIES: dict[str, tuple[Callable[[random.Random], Task], float]] = {
    "count": (count, 2.5),
    "count down": (count_down, 1.5),
    "even numbers": (even, 2.0),
    "spell": (spell, 2.0),
    "repeat": (repeat, 2.5),
    "table": (table, 1.0),
    "reverse": (reverse, 1.5),
    "alphabet": (alphabet, 1.0),
    "small talk": (small_talk, 0.5),
    "unknown": (unknown, 0.3),
}


def draw_task(rng: random.Random, family: str | None = None, *, held_out: bool = False) -> Task:
    """Return a task of a family, or of a random one by weight, from the training or the held-out part."""
    if family is None:
        names = list(FAMILIES)
        family = rng.choices(names, [FAMILIES[name][1] for name in names])[0]
    make = FAMILIES[family][0]
    while (task := make(rng)).held_out != held_out:
        pass
    return task
