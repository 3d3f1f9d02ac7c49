from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from core_fuzz.device import FindingError
from core_fuzz.machine import (
    EVICTIONS,
    STEP_S,
    Abort,
    Add,
    Ask,
    Call,
    Case,
    Expect,
    Finish,
    Machine,
    Pass,
    Reforecast,
    Release,
    Restart,
    Start,
    World,
)
from skipjoin.options import Value
from support.recipes import RECIPES

# Plans in flight, whether they overlap, and stages.
PIPELINES = ((1, False, 1), (2, True, 1), (2, True, 1), (2, False, 1), (2, False, 2), (3, False, 3))
MAX_ROUNDS = 60


def world_of(draw: random.Random, recipes: Sequence[str]) -> World:
    name = draw.choice(recipes)
    recipe = RECIPES[name]
    depth, overlap, stages = draw.choice(PIPELINES)
    # Some policies compare compute with transfer times, so worlds differ in the relation of the two.
    scale, block_s = draw.choice((0.1, 1.0, 10.0)), draw.choice((0.0, 0.0, 1e-5, 5e-4, 2e-2))
    cost = (0.01, 1e-4 * scale, 1e-7 * scale, 1e-4 * scale, 1e-7, block_s, block_s)
    params: dict[str, Value] = {
        "starvation_s": draw.choice((0.05, 0.3, 30.0)),
        "oracle": "max-tokens",
        "ttft_s": draw.choice((0.01, 0.4)),
        "tpot_s": draw.choice((0.01, 0.2)),
        "overdue_s": draw.choice((0.1, 600.0)),
        "base_batch": draw.choice((1, 2, 128)),
        "chunk_tokens": draw.choice((1, 5, 16, 512)),
        "aging_s": draw.choice((0.1, 200.0)),
        "padding": draw.choice((-0.25, 0.15, 1.0)),
        "buffer": draw.choice((0.0, 0.15)),
        "reserve": draw.choice((0.0, 0.03, 0.3)),
        "length_range": draw.choice((1, 32)),
    }
    for chosen in ("order", "promotion"):  # recipes have choices of their own
        if chosen in recipe.parameters:
            params[chosen] = draw.choice(recipe.parameters[chosen].option.choices)
    return World(
        name,
        depth,
        overlap,
        stages,
        device_blocks=draw.choice((2, 3, 4, 5, 6, 8, 10, 14, 20)),
        cpu_blocks=draw.choice((0, 1, 3, 8, 20, 50, 50)),
        block_size=draw.choice((1, 2, 4, 4, 4, 8)),
        max_seqs=draw.choice((1, 2, 3, 8)),
        max_tokens=draw.choice((1, 4, 7, 16, 64, 512)),
        best_effort_wait_s=draw.choice((0.02, 0.05, 0.1, 60.0)),
        fair=draw.random() < 0.1,
        voids=draw.random() < 0.5,
        is_exact=draw.random() < 0.9,
        cost=cost,
        params=tuple((key, value) for key, value in params.items() if key in recipe.parameters),
        eviction=draw.choice((*sorted(EVICTIONS), "share", "patchwork", "spill")) if draw.random() < 0.25 else "",
    )


def with_promotions(draw: random.Random, world: World) -> World:
    """Return the world with a fast link, large steps and early promotion of best-effort requests.

    Promoted requests rank above those that borrow their blocks.
    """
    return replace(
        world,
        cpu_blocks=50,
        max_seqs=8,
        max_tokens=512,
        best_effort_wait_s=draw.choice((0.03, 0.05, 0.08)),
        is_exact=True,
        cost=(*world.cost[:5], 0.0, 0.0),
        eviction="",
    )


class Player:
    """Draws calls and makes them."""

    def __init__(self, seed: str, recipes: Sequence[str]) -> None:
        draw = self._draw = random.Random(seed)
        # Requests that each fill almost the whole device take blocks from each other.
        self._is_tight = draw.random() < 0.3
        while True:
            self.world = world_of(draw, recipes)
            if self._is_tight:
                self.world = with_promotions(draw, self.world)
            try:
                self.machine = Machine(self.world)
            except ValueError:  # the recipe or the scheduler rejects such a world
                continue
            break
        self.calls: list[Call] = []

        def pick(rates: tuple[float, ...]) -> float:
            return 0.0 if self._is_tight and draw.random() < 0.7 else draw.choice(rates)

        self._aborts = pick((0.0, 0.0, 0.03, 0.15))
        self._slice_failures = pick((0.0, 0.0, 0.05, 0.3))
        self._fails = pick((0.0, 0.0, 0.1, 0.5))
        self._holds = pick((0.0, 0.3, 0.8))
        self._restarts = pick((0.0, 0.0, 0.0, 0.03))
        self._reforecasts = pick((0.0, 0.0, 0.2))
        self._passes = pick((0.0, 0.05, 0.2))
        self._fill_rate = draw.choice((1.0, 1.0, 0.6))  # probability that the pipeline is filled
        self._seconds = STEP_S if self._is_tight else draw.choice((0.001, STEP_S, 0.05))
        self._asks = self._load()

    def _load(self) -> list[Ask]:
        draw, world = self._draw, self.world
        room = world.device_blocks * world.block_size
        count = draw.choice((1, 2, 3, 4, 6, 9))
        longest = draw.choice((room, room // 2 + 1, 6))
        shortest = draw.choice((1, 1, 1, room * 3 // 4))
        if self._is_tight:
            longest, shortest = room, max(1, room - 2 * world.block_size)
        texts, best_effort = draw.choice((0, 0, 1, 1, 2)), draw.choice((0.0, 0.3, 0.6))
        salts = draw.choice((1, 1, 2))
        priorities, clients = draw.choice(((0,), (0, 1))), ("a", "b") if world.fair else ("",)
        has_options = draw.random() < 0.15
        forecasts = draw.random() < 0.7
        asks = []
        for number in range(count):
            if self._is_tight:  # mostly a best-effort request, then a real-time one that arrives while it runs
                best_effort = 0.1 if number % 2 else 0.9
            low = min(shortest, room - 1) if draw.random() < 0.8 else 1
            prompt = draw.randint(low, max(low, min(longest, room - 1)))
            max_tokens = min(draw.randint(1, 8), room - prompt)
            asks.append(
                Ask(
                    number,
                    prompt,
                    max_tokens,
                    text=(1 + draw.randrange(texts), draw.choice((0, 5, 12, 80))) if texts else (0, 0),
                    salt=draw.randrange(salts) if texts and draw.random() < 0.9 else None,
                    best_effort=draw.random() < best_effort,
                    priority=draw.choice(priorities),
                    urgent=has_options and draw.random() < 0.3,
                    forecast=draw.choice((1, 3, 8, 1000)) if forecasts and draw.random() < 0.8 else 0.0,
                    deadline_s=draw.choice((0.02, 0.2)) if has_options and draw.random() < 0.2 else None,
                    client=draw.choice(clients),
                    stops=draw.random() < 0.2,
                    resumed=draw.randrange(max_tokens) if has_options and draw.random() < 0.3 else 0,
                    keeps_kv=has_options and draw.random() < 0.2,
                    program=f"program {number % 2}" if texts else "",
                )
            )
        return asks

    def play(self) -> None:
        """Make calls until all requests have finished. Raises `FindingError`."""
        draw, machine = self._draw, self.machine
        for _ in range(MAX_ROUNDS):
            if not self._asks and not machine.core.requests and not machine.plans:
                break
            self._round(draw)
        machine.drain()

    def _round(self, draw: random.Random) -> None:
        machine, live = self.machine, self.machine.core.requests
        while self._asks and draw.random() < (0.3 if self._is_tight else 0.5):
            ask = self._asks.pop(0)
            if ask.resumed and not self._restarts and draw.random() < 0.5:
                self._call(Expect(ask))
            if ask.id not in machine.expected:
                self._call(Add(ask))
        if machine.expected and draw.random() < 0.5:
            number = draw.choice([*machine.expected])
            self._call(Add(Ask(number, 1, 1)))
        if draw.random() < self._passes:
            self._call(Pass(draw.choice((0.05, 0.2, 6.0))))
        self._call(Start(draw.random() < self._fill_rate))
        if live and draw.random() < self._aborts:
            self._call(Abort(draw.choice([*live])))
        if live and draw.random() < self._reforecasts:
            self._call(Reforecast(draw.choice([*live]), draw.choice((1.0, 3.0, 9.0, 1e6))))
        if draw.random() < self._restarts:
            self._call(Restart())
        if machine.kept and draw.random() < 0.3:
            self._call(Release(draw.choice([*machine.kept])))
        if machine.plans and draw.random() < self._fill_rate + 0.2:
            self._call(self._finish(draw))

    def _finish(self, draw: random.Random) -> Finish:
        fails_slices = fails = ()
        if self._slice_failures:
            fails_slices = tuple(
                s.request.id for s in self.machine.plans[0].slices if draw.random() < self._slice_failures
            )
        if self._fails:
            fails = tuple(number for number in (None, *self.machine.core.requests) if draw.random() < self._fails)
        held = draw.randint(1, 3) if self._holds and draw.random() < self._holds else 0
        return Finish(self._seconds, fails_slices, fails, held)

    def _call(self, call: Call) -> None:
        self.calls.append(call)
        self.machine.call(call)

    @property
    def case(self) -> Case:
        return Case(self.world, tuple(self.calls))


def play(seed: str, recipes: Sequence[str]) -> tuple[Player, FindingError | None]:
    player = Player(seed, recipes)
    try:
        player.play()
    except FindingError as finding:
        return player, finding
    return player, None
