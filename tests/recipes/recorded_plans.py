"""Plans of small runs as text, recorded in `plans/`, so that a change of a decision shows as a diff.

    python tests/recipes/recorded_plans.py

records them again, after an intended change of decisions. Each line has a time in seconds and an event. The line

    0.045700  step 7 | 2[0:16]* +4-7 | 0@21~ | out 1: 8-9>0-1 | beside: in 3: 0>2

is the decision of step 7, in parts:

- `2[0:16]*` computes prompt tokens 0 to 15 of request 2 and samples its next token (`*`).
- `+4-7` adds device blocks 4 to 7 to those of its earlier steps; `=` in place of `+` lists all of its blocks.
- `0@21~` computes token 21 of request 0 and samples the next one; a step in flight still samples the input token (`~`).
- `out 1: 8-9>0-1` moves device blocks 8 and 9 of request 1 to blocks 0 and 1 of the CPU tier before the step.
- `beside: in 3: 0>2` moves a block of request 3 in during the step.

Slots of a block are in parentheses. Other lines report requests that arrive, are preempted and finish.
"""

from __future__ import annotations

import difflib
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from skipjoin.core.events import (
    Admitted,
    Arrived,
    Event,
    Finished,
    MoveFailed,
    Planned,
    Preempted,
    Preemption,
    Reserved,
)
from skipjoin.core.forecast import Forecast
from skipjoin.core.request import DEFAULT_OPTIONS, ProgramId, Request
from skipjoin.core.step import Move, Slice, StepPlan
from skipjoin.exec.simulated import never
from support.load import changed, load
from support.policies import EVICTIONS
from support.watch import Run, World, run

FOLDER = Path(__file__).with_name("plans")
# Maximum number of lines of a diff that is shown.
MAX_LINES = 24


@dataclass(frozen=True)
class Scenario:
    """A small run.

    Attributes:
        requests: Arguments of `load`, by name.
        error: Forecasts are wrong by up to this factor; None for requests without forecasts.
        clients: Number of clients that send the requests in turn.
        programs: Number of programs whose calls they are, in turn.
        failures: Share of moves that fail.
        urgent: Id of an urgent request.
        deadline: Id of a request with a deadline that it cannot meet.
        fails_slices_of: Id of a request whose slices the executor fails after its prompt.
    """

    world: World
    requests: dict[str, object]
    error: float | None = None
    clients: int = 1
    programs: int = 0
    failures: float = 0.0
    urgent: int | None = None
    deadline: int | None = None
    fails_slices_of: int | None = None

    def run(self) -> Run:
        draw = random.Random(7)
        sent = load(**{"seed": 3, "count": 14, "prompts": (1, 30), "outputs": (2, 14)} | self.requests)  # type: ignore[arg-type]
        if self.clients > 1:
            sent = [changed(request, client="abc"[request.id % self.clients]) for request in sent]
        if self.programs:
            names = [ProgramId("", f"program {number}") for number in range(self.programs)]
            sent = [changed(request, program=names[request.id % self.programs]) for request in sent]
        for request in sent if self.error is not None else ():
            request.progress.expect(Forecast(request.max_tokens * self.error ** draw.uniform(-1, 1), "test"))
        for number, change in ((self.urgent, {"is_urgent": True}), (self.deadline, {"deadline_s": 0.2})):
            if number is not None:
                sent[number] = changed(sent[number], **change)
        fails = (lambda move: draw.random() < self.failures) if self.failures else never
        return run(self.world, sent, fails=fails, fails_slice=self._fails_slice)

    def _fails_slice(self, piece: Slice) -> bool:
        return piece.request.id == self.fails_slices_of and piece.start > 0


def small(recipe: str, eviction: str | None = None, **settings: object) -> World:
    """Return a world in which half of the requests fit on the device; None keeps the recipe's own eviction."""
    own = {"device_blocks": 20, "cpu_blocks": 30, "max_seqs": 5}
    return World(recipe, eviction=EVICTIONS[eviction] if eviction else None, **own | settings)  # type: ignore[arg-type]


OVERLAPPED = {"depth": 2, "overlap": True}
# No other place names the recipes of recorded plans.
SCENARIOS = {
    "fcfs": Scenario(small("fcfs"), {}),
    "fcfs-priorities": Scenario(small("fcfs", **OVERLAPPED), {"priorities": (-1, 0, 7)}, urgent=8, deadline=4),
    "fcfs-prefixes": Scenario(small("fcfs", "swap"), {"texts": 2, "prompts": (10, 40)}),
    "fcfs-clients": Scenario(small("fcfs", fair_output_weight=2.0), {"rate": 300.0}, clients=3),
    "fcfs-dropped": Scenario(small("fcfs", "spill", depth=2), {}, failures=0.3, fails_slices_of=3),
    "sarathi": Scenario(small("sarathi", max_tokens=12), {}),
    "sarathi-prefixes": Scenario(small("sarathi", max_tokens=16, **OVERLAPPED), {"texts": 2, "prompts": (10, 40)}),
    "sarathi-3-stages": Scenario(small("sarathi", depth=3, stages=3), {}),
    "fastserve": Scenario(small("fastserve"), {}),
    "fastserve-overlapped": Scenario(small("fastserve", **OVERLAPPED), {}),
    "fastserve-recompute": Scenario(small("fastserve", "recompute"), {}),
    "fastserve-starvation": Scenario(small("fastserve", "swap", starvation_s=0.05), {"rate": 300.0}),
    "fastserve-failing-moves": Scenario(small("fastserve"), {}, failures=0.5),
    "fastserve-classes": Scenario(small("fastserve"), {"best_effort": 0.5}),
    "adaptive": Scenario(small("adaptive"), {"count": 24}, error=2.0),
    "adaptive-overlapped": Scenario(small("adaptive", **OVERLAPPED), {"rate": 300.0}),
    "adaptive-programs": Scenario(
        small("adaptive"), {"count": 24, "texts": 3, "prompts": (10, 40), "rate": 20.0}, programs=6
    ),
    "alise": Scenario(small("alise"), {}, error=2.0),
    "alise-2-stages": Scenario(small("alise", "swap", depth=2, stages=2), {}, error=2.0),
    "econoserve": Scenario(
        small("econoserve", device_blocks=40, max_seqs=12), {"count": 20, "outputs": (2, 60), "rate": 300.0}, error=1.5
    ),
    "bros": Scenario(small("bros"), {"best_effort": 0.5, "outputs": (6, 20)}),
    "bros-overlapped": Scenario(small("bros", **OVERLAPPED), {"best_effort": 0.5, "texts": 3, "seed": 26}),
    "srpt-defer": Scenario(small("srpt", "defer"), {}),
}


def text_of(done: Run) -> str:
    blocks: dict[Request, Sequence[int]] = {}
    lines = [f"{event.now:.6f}  {line}" for event in done.events for line in _lines(event, blocks)]
    return "\n".join([*lines, f"{done.end:.6f}  end", ""])


def _lines(event: Event, blocks: dict[Request, Sequence[int]]) -> Iterator[str]:
    match event:
        case Arrived(request=request):
            size = f"{len(request.prompt)} tokens, at most {request.max_tokens} more"
            yield f"arrive {request.id}: {size}{_options(request)}"
        case Admitted(request=request, cached=cached, on_cpu=on_cpu) if cached:
            yield f"find {cached} tokens of {request.id} in the prefix cache, {on_cpu} of them on the CPU tier"
        case Reserved(request=request, parent=parent, blocks=count) if parent is not None:
            owner = parent.id if isinstance(parent, Request) else parent.name
            yield f"reserve {count} blocks for {request.id} out of those of {owner}"
        case Preempted(request=request, how=how, kept=kept):
            yield f"{how.name.lower()} {request.id}" + f", keep {kept} tokens" * (how is not Preemption.PAUSE)
        case Planned(plan=plan):
            yield " | ".join(_parts(plan, blocks))
        case MoveFailed(move=move):
            yield f"{_move(move)} failed"
        case Finished(request=request, reason=reason):
            yield f"finish {request.id}: {reason}"
        case _:
            pass


def _options(request: Request) -> str:
    options = request.options
    names = [name for name in options.__slots__ if getattr(options, name) != getattr(DEFAULT_OPTIONS, name)]
    found = "".join(f", {name} {getattr(options, name)}" for name in names)
    return found if request.progress.forecast is None else f"{found}, forecast {request.progress.forecast.tokens:.1f}"


def _parts(plan: StepPlan, blocks: dict[Request, Sequence[int]]) -> Iterator[str]:
    yield f"step {plan.id}"
    for piece in plan.slices:
        yield _slice(piece, blocks)
    yield from map(_move, plan.blocking)
    yield from (f"beside: {_move(move)}" for move in plan.overlapped)


def _slice(piece: Slice, blocks: dict[Request, Sequence[int]]) -> str:
    end = piece.start + piece.tokens
    is_decode = piece.tokens == 1 and piece.samples
    text = f"@{piece.start}" if is_decode else f"[{piece.start}:{end}]" + "*" * piece.samples
    before = blocks.get(piece.request, ())
    blocks[piece.request] = piece.blocks
    if before == piece.blocks[: len(before)]:
        new = piece.blocks[len(before) :]
        table = f" +{_numbers(new)}" if new else ""
    else:
        table = f" ={_numbers(piece.blocks)}"
    return f"{piece.request.id}{text}{'~' * piece.awaits}{table}"


def _move(move: Move) -> str:
    owner = "cache" if move.request is None else str(move.request.id)
    slots = "".join(f"({first}+{count})" for first, count in move.spans)
    return f"{move.direction.name.lower()} {owner}: {_numbers(move.source)}>{_numbers(move.target)}{slots}"


def _numbers(numbers: Sequence[int]) -> str:
    """Return the numbers in order, with runs of consecutive ones as first-last."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def recorded(name: str) -> str:
    return (FOLDER / f"{name}.txt").read_text()


def difference(name: str, text: str) -> str:
    """Return where the text first differs from the recorded one, as a diff; empty if they are equal."""
    lines = [
        *difflib.unified_diff(recorded(name).splitlines(), text.splitlines(), f"plans/{name}.txt", "now", lineterm="")
    ]
    hunk = next((at for at, line in enumerate(lines[3:], 3) if line.startswith("@@")), len(lines))
    return "\n".join(lines[: min(hunk, MAX_LINES)])


if __name__ == "__main__":
    for path in FOLDER.glob("*.txt"):
        path.unlink()
    for name, scenario in SCENARIOS.items():
        (FOLDER / f"{name}.txt").write_text(text_of(scenario.run()))
