from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from chaos.catalog import SIZE, entry, numbers
from chaos.faults import FAULTS
from support.recipes import SPELLED

# Number of consecutive rounds with the same world, which share one server while it lives.
BLOCK = 10
# Seconds within which the requests of a round start.
_SPREAD_S = 1.5
RECIPES = tuple(
    SPELLED[label]
    for label in ("fastserve", "fcfs", "econoserve", "bros", "alise", "sarathi", "fastserve-recompute", "round-robin")
)


@dataclass(frozen=True)
class World:
    """Kind of server."""

    name: str
    options: tuple[str, ...] = ()
    small_disk: bool = False
    needs_ray: bool = False
    faults: tuple[str, ...] = ()


ONE_ENGINE = (
    "none",
    "pause engine",
    "pause api",
    "stutter",
    "kill engine",
    "kill api",
    "end starts",
    "terminate",
    "few descriptors",
    "little memory",
)
WORLDS = (
    World("plain", faults=ONE_ENGINE),
    World("full queue", ("--max-num-queued-reqs", "8"), faults=ONE_ENGINE),
    World("small disk", small_disk=True, faults=("full disk", "full disk", "end starts", "kill engine", "pause api")),
    World(
        "ranks",
        ("-tp", "2"),
        faults=("kill rank", "pause rank", "kill rank", "pause engine", "kill engine", "end starts", "terminate"),
    ),
    World(
        "replicas",
        ("--replicas", "2"),
        needs_ray=True,
        faults=("kill engine of a replica", "kill replica", "pause engine", "pause replica", "end starts", "terminate"),
    ),
)


@dataclass(frozen=True)
class Ask:
    """Planned HTTP request.

    Attributes:
        number: Number of its entry in the catalog.
        extra: Additional fields of its body.
        manner: Client behavior: read, slow, stuck or leave.
        after: Number of events after which a leaving client disconnects.
        begin_s: Start in seconds after the beginning of the round.
    """

    number: int
    extra: dict[str, Any]
    manner: str
    after: int
    begin_s: float

    @property
    def is_streamed(self) -> bool:
        return bool(self.extra["stream"])

    @property
    def body(self) -> dict[str, Any]:
        return {**entry(self.number).body, **self.extra}


@dataclass(frozen=True)
class Round:
    """Plan of a round.

    Attributes:
        block: Rounds of a block share a server while it lives.
        garbage: Start times and bytes of connections that send no complete request.
        lines: Entries of a batch, all to one path.
        at: Number of received events after which the fault happens.
        late_s: Seconds after which the fault happens at the latest.
        length_s: Duration of a temporary fault.
    """

    seed: int
    number: int
    block: int
    world: World
    recipe: str
    asks: tuple[Ask, ...]
    garbage: tuple[tuple[float, bytes], ...]
    lines: tuple[int, ...]
    fault: str
    at: int
    late_s: float
    length_s: float

    @property
    def replay(self) -> str:
        return f"PYTHONPATH=tests python -m chaos --seed {self.seed} --round {self.number} --rounds 1"

    def __str__(self) -> str:
        batch = f", a batch of {len(self.lines)}" if self.lines else ""
        return f"round {self.number}: {self.world.name}, {self.recipe}, {len(self.asks)} requests{batch}, {self.fault}"


def plan(seed: int, number: int) -> Round:
    block = random.Random(f"block/{seed}/{number // BLOCK}")
    order = random.Random(f"worlds/{seed}").sample(WORLDS, len(WORLDS))
    world = order[number // BLOCK % len(order)]
    recipe = block.choice(RECIPES)
    faults = [
        name for _ in range(-(-BLOCK // len(world.faults))) for name in block.sample(world.faults, len(world.faults))
    ]
    assert set(faults) <= set(FAULTS)
    draw = random.Random(f"round/{seed}/{number}")
    asks = tuple(_ask(draw) for _ in range(draw.randint(10, 28)))
    return Round(
        seed=seed,
        number=number,
        block=number // BLOCK,
        world=world,
        recipe=recipe,
        asks=asks,
        garbage=tuple((draw.uniform(0, _SPREAD_S), draw.choice(_GARBAGE)) for _ in range(draw.randint(0, 4))),
        lines=_lines(draw),
        fault=faults[number % BLOCK],
        at=draw.randint(1, 300),
        late_s=draw.uniform(0.3, 2.5),
        length_s=draw.uniform(0.2, 2.0),
    )


_GARBAGE = (
    b"",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Le",
    b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{"prompt": "Cou',
    b"\x16\x03\x01\x02\x00\x01\x00 this is not HTTP\r\n\r\n",
)


def _ask(draw: random.Random) -> Ask:
    extra: dict[str, Any] = {"stream": draw.random() < 0.6}
    if extra["stream"]:
        extra["stream_options"] = {"include_usage": True}
    if draw.random() < 0.6:
        extra["service_tier"] = draw.choice(("flex", "default", "priority", "auto"))
    if draw.random() < 0.08:
        extra["deadline_ms"] = draw.choice((50, 400, 3000))
    if draw.random() < 0.2:
        extra["slo"] = {"jct_ms": draw.randint(100, 5000)}
    manner = draw.choices(("read", "slow", "stuck", "leave"), (65, 12, 5, 18))[0]
    return Ask(draw.randrange(SIZE), extra, manner, draw.randint(0, 60), draw.uniform(0, _SPREAD_S))


def _lines(draw: random.Random) -> tuple[int, ...]:
    if draw.random() < 0.4:
        return ()
    path = entry(draw.randrange(2)).path
    return tuple(draw.choice(numbers(path)) for _ in range(draw.randint(3, 12)))
