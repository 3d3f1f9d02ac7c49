from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pprint import pformat
from typing import Any

from core_fuzz.machine import Add, Case, Expect, Finish, Pass, Start, replay

_SIMPLER: dict[str, tuple[Any, ...]] = {
    "eviction": ("",),
    "fair": (False,),
    "voids": (False,),
    "is_exact": (True,),
    "stages": (1,),
    "depth": (1, 2),
    "overlap": (True, False),
    "cost": ((0.01, 1e-3),),
    "best_effort_wait_s": (60.0, 0.1),
    "max_seqs": (8, 2, 1),
    "max_tokens": (64,),
    "cpu_blocks": (0, 1, 2, 4, 8, 100),
    "device_blocks": tuple(range(2, 21)),
    "block_size": (4, 1, 2),
}


def shrunk(case: Case, kind: str, seconds: float) -> Case:
    """Return a smaller case with a finding of the same kind, within a time limit."""
    end = time.monotonic() + seconds

    def fails(some: Case) -> bool:
        found = replay(some)
        return found is not None and found.kind == kind

    before = None
    while case != before and time.monotonic() < end:
        before = case
        case = _fewer_calls(case, fails, end)
        for simpler in (_worlds, _asks, _finishes):
            case = _first_that_fails(case, simpler, fails, end)
    return case


def _fewer_calls(case: Case, fails: Callable[[Case], bool], end: float) -> Case:
    size = max(1, len(case.calls) // 2)
    while size and time.monotonic() < end:
        at = len(case.calls) - size
        while at > -size:
            less = replace(case, calls=case.calls[: max(0, at)] + case.calls[max(0, at) + size :])
            if len(less.calls) < len(case.calls) and fails(less):
                case = less
            at -= size
        size //= 2
    return case


def _first_that_fails(
    case: Case, simpler: Callable[[Case], Iterator[Case]], fails: Callable[[Case], bool], end: float
) -> Case:
    found = True
    while found and time.monotonic() < end:
        found = False
        for smaller in simpler(case):
            if fails(smaller):
                case, found = smaller, True
                break
    return case


def _worlds(case: Case) -> Iterator[Case]:
    world = case.world
    for index in range(len(world.params)):
        yield replace(case, world=replace(world, params=world.params[:index] + world.params[index + 1 :]))
    for name, values in _SIMPLER.items():
        now = getattr(world, name)
        for value in values:
            if value == now:
                break
            yield replace(case, world=replace(world, **{name: value}))


def _asks(case: Case) -> Iterator[Case]:
    for index, call in enumerate(case.calls):
        if not isinstance(call, Add | Expect):
            continue
        ask = call.ask
        for change in (
            {"salt": None, "text": (0, 0)},
            {"text": (1, ask.prompt)},
            {"best_effort": False},
            {"urgent": False},
            {"priority": 0},
            {"client": ""},
            {"program": ""},
            {"deadline_s": None},
            {"stops": False},
            {"forecast": 0.0},
            {"resumed": 0},
            {"keeps_kv": False},
            *({"prompt": prompt} for prompt in (1, ask.prompt // 2, ask.prompt - 1) if 1 <= prompt < ask.prompt),
            *({"max_tokens": length} for length in (1, 2, ask.max_tokens - 1) if ask.resumed < length < ask.max_tokens),
        ):
            less = ask._replace(**change)
            if less != ask:
                yield _with(case, index, call._replace(ask=less))


def _finishes(case: Case) -> Iterator[Case]:
    for index, call in enumerate(case.calls):
        match call:
            case Finish(seconds, fails_slices, fails, held):
                for change in (
                    {"fails_slices": ()},
                    {"fails": ()},
                    *({"fails_slices": (number,)} for number in fails_slices if len(fails_slices) > 1),
                    *({"fails": (number,)} for number in fails if len(fails) > 1),
                    {"held": 0} if held else {},
                    {"seconds": 0.01} if seconds != 0.01 else {},
                ):
                    less = call._replace(**change)
                    if less != call:
                        yield _with(case, index, less)
            case Start(fills) if not fills:
                yield _with(case, index, Start())
            case Pass(seconds) if seconds not in (0.1, 6.0):
                yield _with(case, index, Pass(0.1 if seconds < 0.1 else 6.0))


def _with(case: Case, index: int, call: Any) -> Case:
    return replace(case, calls=(*case.calls[:index], call, *case.calls[index + 1 :]))


def script(case: Case) -> str:
    imports = "from core_fuzz.machine import *  # with tests/ in PYTHONPATH"
    return f"# {replay(case)}\n{imports}\n\ncase = {pformat(case, width=110)}\nraise replay(case)\n"
