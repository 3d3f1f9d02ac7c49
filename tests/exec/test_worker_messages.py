from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable

import pytest
from engines import Restless, SwapAll, engine, make_core, mixed_requests, run, tiny_model

from skipjoin.core.events import Planned
from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move, Slice, Span, StepPlan
from skipjoin.exec.local import LocalExecutor
from skipjoin.exec.ranks.plan_messages import OutOfStepError, PlanReader, PlanWriter
from skipjoin.exec.sampling import Sampling
from skipjoin.sampling import SamplingParams

SAMPLING = Sampling(SamplingParams(temperature=0.5, logit_bias={3: 1.5}, stop=("x",)), -(2**63), (2, 7))


class MirroringExecutor(LocalExecutor):
    """Executor that runs each plan as a rank decodes it, after checking that it equals the original."""

    def __init__(self, local: LocalExecutor) -> None:
        self._local = local
        self.writer, self.reader = PlanWriter(), PlanReader()
        self.sizes: list[int] = []
        self.max_mirrored = 0
        self._moves: list[Move] = []

    def submit(self, plan: StepPlan, now: float):
        message = self.writer.write(plan)
        self.sizes.append(len(message))
        read = self.reader.read(message)
        assert self.reader.checksum == self.writer.checksum
        for request in self.reader.finished:
            self._local.on_finished(request)
        self.max_mirrored = max(self.max_mirrored, len(self.reader._requests))
        check_same(plan, read)
        self._moves += (*plan.blocking, *plan.overlapped)
        return TranslatedHandle(self, plan, self._local.submit(read, now))

    def on_finished(self, request: Request) -> None:
        self.writer.on_finished(request)

    def moves(self, ended):
        return [self._moves[number] for number in self.reader.numbers_of(ended)]

    def close(self) -> None:
        self._local.close()


class TranslatedHandle:
    """Handle that translates the result of a decoded plan back to the original."""

    def __init__(self, executor: MirroringExecutor, plan: StepPlan, handle) -> None:
        self._executor, self._plan, self._handle = executor, plan, handle

    def result(self):
        result = self._handle.result()
        completed, failed = self._executor.moves(result.completed), self._executor.moves(result.failed)
        return type(result)(self._plan, result.tokens, result.seconds, result.details, result.moving, completed, failed)


def check_same(made: StepPlan, read: StepPlan) -> None:
    assert read.id == made.id
    for ours, theirs in zip(read.slices, made.slices, strict=True):
        assert ours[1:] == theirs[1:]
        check_same_request(ours.request, theirs.request, ours.start + ours.tokens - ours.awaits)
    for ours_moves, theirs_moves in ((read.blocking, made.blocking), (read.overlapped, made.overlapped)):
        for one, other in zip(ours_moves, theirs_moves, strict=True):
            assert (one.direction, *one[2:]) == (other.direction, *other[2:])
            assert one.request.id == other.request.id


def check_same_request(ours: Request, theirs: Request, end: int) -> None:
    assert ours is not theirs
    assert ours.id == theirs.id
    assert ours.prompt == theirs.prompt
    assert ours.sampling == theirs.sampling
    assert ours.tokens(0, end) == theirs.tokens(0, end)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("eviction", [SwapAll, lambda: Restless(3)])
def test_ranks_decode_the_original_plans(eviction: Callable, depth: int) -> None:
    model = tiny_model("llama")
    options = dict(device_blocks=14, cpu_blocks=60, slots=2, chunk=7)
    core, local = engine(model, eviction(), depth=depth, **options)
    executor = MirroringExecutor(local)
    requests = mixed_requests()
    events = run(core, executor, requests)  # type: ignore[arg-type]
    alone = mixed_requests()
    run(*engine(model, SwapAll(), device_blocks=60), alone)
    assert [request.progress.output for request in requests] == [request.progress.output for request in alone]
    plans = [event.plan for event in events if isinstance(event, Planned)]
    assert any(plan.blocking or plan.overlapped for plan in plans)
    assert any(piece.awaits for plan in plans for piece in plan.slices) == (depth > 1)


def test_ranks_forget_finished_requests() -> None:
    executor = MirroringExecutor(engine(tiny_model("llama"), SwapAll(), device_blocks=60)[1])
    core = make_core(SwapAll(), device_blocks=60, slots=4)
    core.on_finished = executor.on_finished
    draw = random.Random(0)
    sampling = Sampling(SamplingParams(temperature=0), 0, ())
    for number in range(120):
        core.add(Request(number % 4, 0.0, [draw.randrange(90)], 2, sampling=sampling), 0.0)
        if number % 4 == 3:
            core.abort(number % 4, 0.0)
            while core.requests:  # ids are reused from here on
                plan = core.start_step(0.0)
                assert plan is not None
                core.finish_step(executor.submit(plan, 0.0).result(), 0.0)
    executor.close()
    assert executor.max_mirrored <= 4  # the maximum number of unfinished requests


def request_of(number: int, prompt: int = 5) -> Request:
    return Request(number, 0.0, list(range(prompt)), 50, sampling=SAMPLING)


def test_decode_messages_are_small_for_any_context_length() -> None:
    writer, requests = PlanWriter(), [request_of(number, 3000) for number in range(64)]
    tables = [tuple(range(i * 200, i * 200 + 188)) for i in range(64)]
    first = writer.write(
        StepPlan(0, tuple(Slice(r, 0, 3000, True, False, t) for r, t in zip(requests, tables, strict=True)))
    )
    assert len(first) > 64 * 3000
    for request in requests:
        request.progress.output.append(7)
    tables = [(*table, 20000 + i) for i, table in enumerate(tables)]  # each grows by a block
    slices = tuple(Slice(r, 3000, 1, True, False, t) for r, t in zip(requests, tables, strict=True))
    assert len(writer.write(StepPlan(1, slices))) < 64 * 24


def test_block_tables_may_shrink_change_or_stay() -> None:
    writer, reader, request = PlanWriter(), PlanReader(), request_of(0)
    for number, table in enumerate([(1, 2, 3), (1, 2, 3), (1, 2), (1, 2, 9), (4, 5, 6, 7), (5,)]):
        plan = StepPlan(number, (Slice(request, 0, 1, False, False, table),))
        assert reader.read(writer.write(plan)).slices[0].blocks == table


def test_moves_are_numbered_across_plans_and_may_repeat() -> None:
    writer, reader, request = PlanWriter(), PlanReader(), request_of(0)
    move = Move(Direction.OUT, request, (3,), (4,), 3)
    incoming = Move(Direction.IN, request, (4,), (3,), 3, (Span(0, 1), Span(1, 2)))
    first = reader.read(writer.write(StepPlan(0, (), blocking=(move,), overlapped=(incoming,))))
    assert reader.numbers_of([*first.overlapped, *first.blocking]) == [1, 0]
    again = reader.read(writer.write(StepPlan(1, (), overlapped=(move,))))
    assert reader.numbers_of(again.overlapped) == [2]
    writer.on_finished(request)
    reader.read(writer.write(StepPlan(2, ())))
    assert not reader._requests


def messages(count: int) -> list[bytes]:
    writer, request = PlanWriter(), request_of(0)
    return [
        writer.write(StepPlan(number, (Slice(request, number, 1, False, False, (0, 1)),))) for number in range(count)
    ]


@pytest.mark.parametrize(
    "alter",
    [
        lambda sent: [sent[0], sent[2]],
        lambda sent: [sent[0], sent[0]],
        lambda sent: [sent[1], sent[0]],
        lambda sent: [sent[0], sent[1][:-1] + b"\x05"],
        lambda sent: [sent[0], b"\x00" + sent[1][1:]],
        lambda sent: [sent[0], sent[1][:-1]],
    ],
    ids=["missed", "repeated", "reordered", "changed", "checksum changed", "cut"],
)
def test_ranks_detect_missing_and_altered_plans(alter: Callable) -> None:
    reader, sent = PlanReader(), alter(messages(3))
    with pytest.raises(OutOfStepError, match=r"checksum of all plans up to this one is [0-9a-f]{16} here"):
        read_all(reader, sent)


def read_all(reader: PlanReader, sent: list[bytes]) -> None:
    for message in sent:
        reader.read(message)


def test_checksum_covers_all_previous_plans() -> None:
    one, other = PlanWriter(), PlanWriter()
    one.write(StepPlan(0, ()))
    other.write(StepPlan(1, ()))
    assert one.write(StepPlan(2, ())) != other.write(StepPlan(2, ()))


_RACE = """
import importlib, sys, threading
from skipjoin.exec.ranks import messages, plan_messages
from skipjoin.core.step import StepPlan

def read(start):
    start.wait()
    plan_messages.PlanReader().read(message)

sys.setswitchinterval(1e-6)
for _ in range(200):
    importlib.reload(messages)
    importlib.reload(plan_messages)
    message = plan_messages.PlanWriter().write(StepPlan(1, ()))
    start = threading.Barrier(2)
    threads = [threading.Thread(target=read, args=(start,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_may_decode_their_first_plans_concurrently() -> None:
    """The check runs in a process of its own, because a decoder created by two threads at once crashes the process."""
    assert subprocess.run([sys.executable, "-c", _RACE], timeout=60, check=False).returncode == 0
