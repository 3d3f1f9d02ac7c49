from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import ClassVar

import msgspec
import pytest
import torch
from engines import (
    BLOCK_SIZE,
    COMMON,
    CONFIGS,
    Restless,
    SwapAll,
    engine,
    findable,
    make_core,
    mixed_requests,
    run,
    shortened,
)
from rank_links import LAYERS, thread_executor
from test_invisible_preemption import happened

from skipjoin.core.events import Computed, Event, Planned, Preemption, Token
from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move, Slice, StageTime, StepPlan
from skipjoin.exec import worker
from skipjoin.exec.base import RankError
from skipjoin.exec.clocks import CpuClock
from skipjoin.exec.graphs import Run
from skipjoin.exec.kv_store import KVStore
from skipjoin.exec.ranks.messages import Done, RankFailed
from skipjoin.exec.ranks.plan_messages import OutOfStepError, PlanReader
from skipjoin.exec.ranks.sharded import ShardedExecutor
from skipjoin.exec.sampling import Sampling
from skipjoin.exec.worker import Worker
from skipjoin.model.loader import random_model
from skipjoin.model.parallel import Shard
from skipjoin.policies.eviction import Recompute
from skipjoin.sampling import SamplingParams
from support.policies import ShareAll, SpillAll
from support.worlds import exhaustive, halved, one_in

LAYOUTS = ((2, 1), (1, 2), (2, 2), (1, 3))
_RESTLESS = dict(eviction=lambda: Restless(5), device_blocks=40, cpu_blocks=40, slots=2, chunk=5)
_SWAPPED = dict(eviction=SwapAll, device_blocks=16, cpu_blocks=60, slots=2)
FORCED = {
    "dropped": dict(eviction=Recompute, device_blocks=16, slots=3),
    "swapped": _SWAPPED,
    "swapped, copies fail": _SWAPPED | dict(fails=["OUT", "IN"], chunk=7),
    "spilled, copies fail": _SWAPPED | dict(eviction=SpillAll, fails=["OUT", "IN"], chunk=7),
    "shared": dict(eviction=ShareAll, device_blocks=8, cpu_blocks=60, slots=3, chunk=5),
    "moved concurrently": _RESTLESS,
    "moved concurrently, completing late": _RESTLESS | dict(late=4),
    "moved concurrently, late copies fail": _RESTLESS | dict(late=3, fails=["OUT", "IN"]),
}
EXPECTED = {
    "dropped": {Preemption.DROP},
    "swapped": {"moved out blocking", "moved in blocking"},
    "swapped, copies fail": {"failed out blocking", "failed in blocking", Preemption.DROP},
    "spilled, copies fail": {"failed out blocking", "failed in blocking", Preemption.SPILL},
    "shared": {"saved slots"},
    "moved concurrently": {"moved out overlapped", "moved in overlapped"},
    "moved concurrently, completing late": {"moved out overlapped", "moved in overlapped"},
    "moved concurrently, late copies fail": {"failed out overlapped", "failed in overlapped", Preemption.DROP},
}


def one_model(family: str):
    return random_model(CONFIGS[family] | {"num_hidden_layers": LAYERS}, seed=3)


@cache
def outputs_alone(family: str, eos: int | None = None, common: Sequence[int] = ()) -> list[list[int]]:
    requests = mixed_requests(eos, common)
    run(*engine(one_model(family), Recompute(), device_blocks=60, slots=4), requests)
    return outputs(requests)


def outputs(requests: list[Request]) -> list[list[int]]:
    return [request.progress.output for request in requests]


def sharded(case: str, family: str, tp: int, pp: int, *, overlap: bool = False, stages: int = 1):
    """Return a case's core and executor over threads; see `make_core` for `stages`."""
    options = dict(FORCED[case])
    store = {name: options.pop(name) for name in ("late", "fails") if name in options}
    store |= {name: options[name] for name in ("device_blocks", "cpu_blocks") if name in options}
    depth = 2 if overlap else pp
    core = make_core(options.pop("eviction")(), **options, depth=depth, overlap=overlap, stages=stages)
    return core, thread_executor(tp, pp, family, keeps=findable(core), **store)


# Every case has one layout, and every layout two cases. `exhaustive` has the others.
@pytest.mark.parametrize(
    ("case", "tp", "pp"),
    [
        pytest.param(case, tp, pp, marks=pytest.mark.exhaustive if at != number % 4 else ())
        for number, case in enumerate(FORCED)
        for at, (tp, pp) in enumerate(LAYOUTS)
    ],
)
def test_ranks_produce_the_tokens_of_one_rank(case: str, tp: int, pp: int) -> None:
    family = list(CONFIGS)[(list(FORCED).index(case) + tp + 3 * pp) % len(CONFIGS)]
    requests = mixed_requests()
    found = happened(run(*sharded(case, family, tp, pp), requests))
    assert outputs(requests) == outputs_alone(family)
    assert all(found[what] >= 3 for what in EXPECTED[case]), found


@pytest.mark.parametrize("case", halved(FORCED))
def test_ranks_produce_the_tokens_of_one_rank_with_prefix_caching(case: str) -> None:
    tp, pp = ((2, 1), (1, 2))[list(FORCED).index(case) // 2 % 2]
    requests = mixed_requests(common=COMMON, adopts=True)
    found = happened(run(*sharded(case, "llama", tp, pp), requests, leads=True))
    assert outputs(requests) == outputs_alone("llama", common=COMMON)
    assert found["adopted"] >= 3
    assert all(found[what] for what in EXPECTED[case]), found


class Replays:
    """Recorder that keeps the function and requires the same result tensor every time."""

    def __init__(self) -> None:
        self.count = 0

    def record(self, run: Run) -> Run:
        first = run().clone()

        def again() -> torch.Tensor:
            self.count += 1
            return first.copy_(run())

        return again


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), exhaustive(2, 2)])
def test_ranks_replay_decode_graphs(tp: int, pp: int) -> None:
    """Graphs of three rows replay two requests, so that stages also exchange padding."""
    pytest.importorskip("triton")
    requests, recorder = shortened(mixed_requests()[:2], 6), Replays()
    core = make_core(Recompute(), device_blocks=16, slots=2, depth=2)
    run(core, thread_executor(tp, pp, "llama", device_blocks=16, recorder=recorder), requests)
    assert outputs(requests) == [output[:6] for output in outputs_alone("llama")[:2]]
    assert recorder.count >= 4 * tp * pp


@pytest.mark.parametrize("case", one_in(4, FORCED, 1))
def test_ranks_produce_the_tokens_of_one_rank_with_overlapped_steps(case: str) -> None:
    requests = mixed_requests()
    run(*sharded(case, "qwen3", 2, 1, overlap=True), requests)
    assert outputs(requests) == outputs_alone("qwen3")


@pytest.mark.parametrize("turn", [0, exhaustive(1)])
@pytest.mark.parametrize("case", halved(FORCED))
def test_ranks_produce_the_tokens_of_one_rank_with_busy_stages(case: str, turn: int) -> None:
    pp = 2 + (list(FORCED).index(case) // 2 + turn) % 2
    requests = mixed_requests()
    events = run(*sharded(case, "qwen2", 1, pp, stages=pp), requests)
    assert outputs(requests) == outputs_alone("qwen2")
    found = happened(events)
    assert all(found[what] >= 3 for what in EXPECTED[case]), found
    if "chunk" in FORCED[case]:
        assert chunks_in_flight_together(events) >= 3


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_clock_skew_between_ranks_has_no_effect(tp: int, pp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks report durations, and no rank compares its clock with another's."""
    alone = outputs_alone("llama")
    skews: dict[int, float] = {}
    mark = CpuClock.mark

    def skewed(clock: CpuClock) -> float:
        now = mark(clock)
        assert isinstance(now, float)
        return now + 1e5 * skews.setdefault(threading.get_ident(), len(skews) + 1)

    monkeypatch.setattr(CpuClock, "mark", skewed)
    requests = mixed_requests()
    events = run(*sharded("moved concurrently", "llama", tp, pp), requests)
    assert outputs(requests) == alone
    assert len(skews) == tp * pp
    steps = [event.result for event in events if isinstance(event, Computed)]
    assert all(0 <= step.moving <= step.seconds < 1e4 for step in steps)
    assert all(0 <= duration < 1e4 for step in steps for stage in step.stages for duration in stage)


def chunks_in_flight_together(events: list[Event]) -> int:
    """Return the number of slices planned while the previous chunk was in flight."""
    flying: list[StepPlan] = []
    count = 0
    for event in events:
        match event:
            case Planned(plan=plan):
                before = [piece.request for other in flying for piece in other.slices]
                count += sum(piece.request in before for piece in plan.slices)
                flying.append(plan)
            case Computed(result=result):
                flying.remove(result.plan)
            case _:
                pass
    return count


@pytest.mark.parametrize(("tp", "pp", "overlap"), [(2, 1, True), (2, 2, False)])
def test_ranks_handle_stop_tokens_and_aborts(tp: int, pp: int, overlap: bool) -> None:
    alone = outputs_alone("llama")
    eos = Counter(token for output in alone for token in output[1:-1]).most_common(1)[0][0]
    expected = outputs_alone("llama", eos)
    assert any(len(short) < len(full) for short, full in zip(expected, alone, strict=True))
    core, executor = sharded("moved concurrently", "llama", tp, pp, overlap=overlap)
    requests = mixed_requests(eos)
    start_step, plans = core.start_step, 0

    def start_and_abort(now: float):
        nonlocal plans
        plans += 1
        if plans == 6:
            core.abort(1, now)
        return start_step(now)

    core.start_step = start_and_abort  # type: ignore[method-assign]
    run(core, executor, requests)
    assert [o for i, o in enumerate(outputs(requests)) if i != 1] == [o for i, o in enumerate(expected) if i != 1]


def details(events: list[Event]) -> dict[tuple[int, int], object]:
    """Return the log-probabilities by request and token number."""
    seen: Counter[int] = Counter()
    found = {}
    for event in events:
        if isinstance(event, Token):
            found[event.request.id, seen[event.request.id]] = event.detail
            seen[event.request.id] += 1
    return found


def test_ranks_return_log_probabilities() -> None:
    def scored() -> list[Request]:
        params = SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1)
        return [Request(i, 0.0, [3, 1, 4, 1, 5], 4, sampling=Sampling(params, i, ())) for i in range(2)]

    expected = details(run(*engine(one_model("opt"), Recompute(), device_blocks=60), scored()))
    assert len(expected) == 8
    assert all(expected.values())
    core, executor = sharded("dropped", "opt", 2, 2)
    found = details(run(core, executor, scored()))
    assert found.keys() == expected.keys()
    for key, ours in found.items():
        theirs = expected[key]
        assert [score.token for score in (ours.chosen, *ours.prompt)] == [
            score.token for score in (theirs.chosen, *theirs.prompt)
        ]
        assert [score.logprob for score in (ours.chosen, *ours.prompt[1:])] == pytest.approx(
            [score.logprob for score in (theirs.chosen, *theirs.prompt[1:])], abs=1e-5
        )


def test_pipelines_reject_slices_that_await_a_token() -> None:
    core, executor = sharded("dropped", "llama", 1, 2, overlap=True)
    with pytest.raises(RankError, match=r"request \d+ awaits a token that only the last of 2 stages samples"):
        run(core, executor, mixed_requests())
    executor.close()


def test_a_rank_with_altered_plans_computes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def alter(rank: int):
        return (lambda message: message[:-1] + bytes([message[-1] ^ 1])) if rank == 1 else (lambda message: message)

    executor = thread_executor(2, 1, "llama", alter, device_blocks=20)
    core = make_core(Recompute(), device_blocks=20)
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(OutOfStepError, match=r"rank 1 .*: OutOfStepError: the checksum"),
    ):
        run(core, executor, mixed_requests())
    assert "rank 1 (stage 0 of 1, tensor rank 1 of 2) failed" in caplog.text
    executor.close()


class LaterStage:
    """Group of a second stage whose first stage is slow."""

    WAIT_S = 0.2

    def __init__(self, at_receive: Callable[[], None]) -> None:
        self.shard = Shard(pp_rank=1, pp_size=2)
        self.waited_s = 7.0
        self._at_receive = at_receive

    def receive(self, x: torch.Tensor) -> None:
        begin = time.perf_counter()
        self._at_receive()
        time.sleep(self.WAIT_S)
        self.waited_s += time.perf_counter() - begin
        x.fill_(0.5)

    def gather(self, part: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        return part


def test_later_stages_move_blocks_while_waiting_and_exclude_waits_from_seconds() -> None:
    copied: list[int] = []
    group = LaterStage(lambda: copied.append(len(store.copies)))
    model = random_model(CONFIGS["llama"], group=group)  # type: ignore[arg-type]

    class Store(KVStore):
        copies: ClassVar[list[Move]] = []

        def copy(self, move: Move) -> None:
            super().copy(move)
            self.copies.append(move)

    pools = dict(device_blocks=4, cpu_blocks=4, block_size=BLOCK_SIZE)
    store = Store(model.config, model.dtype, model.device, shard=model.shard, **pools)  # type: ignore[arg-type]
    worker = Worker(model, store)
    begin = time.perf_counter()
    result = worker.run(StepPlan(0, (Slice(REQUEST, 0, 2, True, False, (1,)),), blocking=(MOVES[0],)))
    passed = time.perf_counter() - begin
    worker.close()
    assert copied == [1]
    assert list(result.completed) == [MOVES[0]]
    assert result.tokens[0] is not None
    assert 0 < result.seconds <= passed - LaterStage.WAIT_S


class LaterStageOnCard(LaterStage):
    """Later stage that waits for a time that the GPU measures."""

    def receive(self, x: torch.Tensor) -> None:
        self.waited_s += self.WAIT_S
        x.fill_(0.5)


class Events:
    """A GPU's clock, which advances while marks are taken and waits only where durations are read."""

    def __init__(self, device: torch.device) -> None:
        self.marks, self.waits = 0, 0

    def mark(self) -> float:
        self.marks += 1
        return self.marks * 0.5

    def between(self, start: float, end: float) -> float:
        self.waits += 1
        return end - start

    def is_past(self, mark: float) -> bool:
        return False


def test_stages_on_gpus_are_timed_by_gpu_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is queued without waiting for the GPU."""
    monkeypatch.setattr(worker, "DeviceClock", Events)
    model = random_model(CONFIGS["llama"], group=LaterStageOnCard(lambda: None))  # type: ignore[arg-type]
    pools = dict(device_blocks=4, cpu_blocks=0, block_size=BLOCK_SIZE, shard=model.shard)
    store = KVStore(model.config, model.dtype, model.device, **pools)  # type: ignore[arg-type]
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    stage = Worker(model, store)
    monkeypatch.undo()
    clock, plan = stage._clock, StepPlan(0, (Slice(REQUEST, 0, 2, True, False, (1,)),))
    assert isinstance(clock, Events)
    for idle in (0.0, 0.2 + 0.5):
        begun = stage.begin(plan)
        assert clock.waits == 0
        (times,) = stage.finish(begun).stages
        clock.waits = 0
        assert times == (pytest.approx(0.5 - 0.2), pytest.approx(idle))


class ScriptedLink:
    """Link to a rank with scripted answers: fields of `Done`, or another message."""

    def __init__(self, *script: object) -> None:
        self.script = list(script)
        self._reader = PlanReader()
        self._plans: list[tuple[int, bytes]] = []

    def send(self, message: bytes) -> None:
        plan = self._reader.read(message)
        self._plans.append((plan.id, self._reader.checksum))

    def is_ready(self) -> bool:
        return bool(self.script)

    def receive(self, timeout_s: float) -> bytes:
        if not self.script:
            time.sleep(timeout_s)
            raise TimeoutError
        answer = self.script.pop(0)
        plan, checksum = self._plans.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, dict):
            values = dict(
                plan=plan, checksum=checksum, tokens=[], seconds=0.0, idle=0.0, moving=0.0, completed=[], failed=[]
            )
            answer = Done(**(values | answer))
        return msgspec.msgpack.encode(answer)

    def close(self) -> None:
        pass


REQUEST = Request(0, 0.0, [1, 2], 5, sampling=Sampling(SamplingParams(), 0, ()))
MOVES = tuple(Move(Direction.OUT, REQUEST, (number,), (number,), 2) for number in range(3))
PLAN = StepPlan(4, (Slice(REQUEST, 0, 2, True, False, (0,)),))


def executor_of(*links: ScriptedLink, tp_size: int = 1) -> ShardedExecutor:
    return ShardedExecutor(links, tp_size=tp_size, timeout_s=0.5)


def test_tokens_come_from_the_last_stage_and_seconds_add_up() -> None:
    links = [
        ScriptedLink({"seconds": 0.2, "idle": 0.6, "moving": 0.01}),
        ScriptedLink({"seconds": 0.3, "idle": 0.5, "moving": 0.02}),
        ScriptedLink({"seconds": 0.4, "idle": 0.0, "tokens": [9], "moving": 0.03}),
        ScriptedLink({"seconds": 0.1, "idle": 0.3, "tokens": [9]}),
    ]
    result = executor_of(*links, tp_size=2).submit(PLAN, 0.0).result()
    assert result.plan is PLAN
    assert list(result.tokens) == [9]
    assert result.seconds == pytest.approx(0.7)
    assert result.moving == pytest.approx(0.05)
    assert list(result.stages) == [StageTime(0.3, 0.5), StageTime(0.4, 0.0)]


def test_single_stages_report_no_stage_times() -> None:
    links = [ScriptedLink({"seconds": 0.2, "tokens": [9]}) for _ in range(2)]
    assert executor_of(*links, tp_size=2).submit(PLAN, 0.0).result().stages == ()


def test_stages_report_busy_and_idle_times() -> None:
    """A stage's busy and idle seconds add up to the time between two plans."""
    requests = mixed_requests()
    begin = time.perf_counter()
    events = run(*sharded("dropped", "llama", 1, 2, stages=2), requests)
    passed = time.perf_counter() - begin
    results = [event.result for event in events if isinstance(event, Computed)]
    assert all(len(result.stages) == 2 for result in results)
    assert [stage.idle for stage in results[0].stages] == [0.0, 0.0]
    for result in results:
        assert sum(stage.busy for stage in result.stages) == pytest.approx(result.seconds)
        assert all(stage.busy > 0 and stage.idle >= 0 for stage in result.stages)
    for number in range(2):
        spent = sum(result.stages[number].busy + result.stages[number].idle for result in results)
        assert 0 < spent < passed
    # Both stages work, so neither is idle for as long as the other is busy.
    idle = sum(stage.idle for result in results for stage in result.stages)
    assert idle < 2 * passed


def test_moves_complete_on_all_ranks_and_fail_on_any() -> None:
    links = [
        ScriptedLink({"completed": [0, 2]}, {}, {"completed": [1]}),
        ScriptedLink({"completed": [0]}, {"completed": [1]}, {"failed": [2]}),
    ]
    executor = executor_of(*links)
    handles = [executor.submit(StepPlan(0, (), overlapped=MOVES), 0.0)]
    handles += [executor.submit(StepPlan(number, ()), 0.0) for number in (1, 2)]
    assert all(handle.done() for handle in handles)
    assert [list(handle.result().completed) for handle in handles] == [[MOVES[0]], [], [MOVES[1]]]
    assert [list(handle.result().failed) for handle in handles] == [[], [], [MOVES[2]]]


def test_results_are_in_order_and_complete_on_all_ranks() -> None:
    slow = ScriptedLink()
    executor = executor_of(ScriptedLink({}, {"tokens": [1]}), slow)
    first, second = executor.submit(PLAN, 0.0), executor.submit(PLAN, 0.0)
    assert not first.done()
    slow.script += [{"tokens": [5]}, {"tokens": [6]}]
    assert list(second.result().tokens) == [6]
    assert first.done()
    assert list(first.result().tokens) == [5]


GONE, HUNG = RankError("process 7 is gone"), None
LOST, BROKEN = RankFailed("GroupError: connection closed", True), RankFailed("ValueError: bad", False)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (({"tokens": [1]}, {"tokens": [2]}), "sampled different tokens"),
        (({"tokens": [1]}, {"tokens": [1], "plan": 5}), r"rank 1 .* answered plan 5 in place of plan 4"),
        (({"tokens": [1]}, {"tokens": [1], "checksum": b"12345678"}), r"rank 1 .* received other plans"),
        (({"tokens": [1]}, HUNG), r"rank 1 .* did not answer within 0.5 s"),
        (({"tokens": [1]}, GONE), "process 7 is gone"),
        ((HUNG, GONE), "process 7 is gone"),
        ((HUNG, BROKEN), r"rank 1 .* failed: ValueError: bad"),
        ((LOST, GONE), "process 7 is gone"),
        ((LOST, BROKEN), r"rank 1 .* failed: ValueError: bad"),
        ((BROKEN, LOST), r"rank 0 .* failed: ValueError: bad"),
        (([{"tokens": [1]}, BROKEN], LOST), r"rank 0 .* failed: ValueError: bad"),
        (([{"tokens": [1]}, GONE], LOST), "process 7 is gone"),
        (([{"tokens": [1]}, GONE], HUNG), "process 7 is gone"),
        ((LOST, HUNG), r"rank 0 .* failed: GroupError"),
        ((LOST, LOST), r"rank 0 .* failed: GroupError"),
    ],
)
def test_rank_failures_are_reported_and_permanent(answers: tuple, message: str) -> None:
    scripts = [answer if isinstance(answer, list) else [answer, {"tokens": [1]}] for answer in answers]
    links = [ScriptedLink(*script) if script[0] is not HUNG else ScriptedLink() for script in scripts]
    executor = executor_of(*links, tp_size=2)
    first, second = executor.submit(PLAN, 0.0), executor.submit(PLAN, 0.0)
    for handle in (first, second):
        with pytest.raises((RankError, OutOfStepError), match=message):
            handle.result()
        assert handle.done()


@pytest.mark.parametrize(
    ("answer", "message"), [(GONE, "process 7 is gone"), (BROKEN, r"rank 1 .* failed: ValueError: bad")]
)
def test_a_lost_rank_is_reported_while_others_wait_for_it(answer: object, message: str) -> None:
    """The others wait on their GPUs, where NCCL times out only after a minute."""
    executor = executor_of(ScriptedLink(), ScriptedLink(answer), ScriptedLink())
    handle = executor.submit(PLAN, 0.0)
    assert handle.done()
    with pytest.raises(RankError, match=message):
        handle.result()


def test_incomplete_stages_are_rejected() -> None:
    with pytest.raises(ValueError, match="3 ranks cannot form stages of tp_size 2"):
        executor_of(*[ScriptedLink() for _ in range(3)], tp_size=2)
