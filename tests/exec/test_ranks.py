"""Models on ranks produce the tokens of one process, survive kills and leave nothing behind."""

from __future__ import annotations

import dataclasses
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psutil
import pytest

from skipjoin.config import ConfigError, EngineConfig
from skipjoin.core.events import Computed, Finished, Planned, Preempted, Restarted, Token
from skipjoin.core.step import StepPlan
from skipjoin.engine.build import Engine, assemble
from skipjoin.engine.loop import EngineLoop
from skipjoin.exec.base import RankError
from skipjoin.exec.ranks import own_ranks, rank_program
from skipjoin.exec.ranks.launch import GroupSizes
from skipjoin.exec.ranks.own_ranks import OwnLauncher, OwnRanks
from skipjoin.exec.ranks.plan_messages import OutOfStepError
from skipjoin.model.cuda import Card, CudaFacts
from skipjoin.model.errors import ModelError
from skipjoin.observe.metrics import EngineMetrics
from skipjoin.sampling import SamplingParams
from skipjoin.structured_output import StructuredOutput
from support.forks import ForkedProgram, as_module
from support.recipes import SPELLED
from support.waiting import wait_until
from support.worlds import exhaustive

# The KV pool and the CPU tier each hold four of the requests.
PRESSED = {"kv_cache_gib": 80 * 65536 / 2**30, "swap_space_gib": 60 * 65536 / 2**30, "max_model_len": 256}
Outputs = dict[int, list[int]]


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # importing it fails


def config(tp: int, pp: int, **settings: Any) -> EngineConfig:
    common = {"dtype": "float32", "profile": "off", "threads": 1, "seed": 4, **PRESSED, **settings}
    return EngineConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp, **common)


def ranks() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it may have exited since
            if child.name() == ForkedRank.NAME or "skipjoin.exec.ranks.rank_program" in child.cmdline():
                found.append(child)
    return found


class ForkedRank(ForkedProgram):
    """Most of a rank's start would be the import of torch."""

    NAME = "rank"

    def run(self, command: list[str], pass_fds: Sequence[int]) -> int:
        rank_program.main(pass_fds[0], int(command[-1]))
        return 0


def wait_until_gone(seconds: float = 30.0) -> None:
    wait_until(lambda: not ranks(), seconds)


# Has more tokens than the outputs.
NUMBERS = StructuredOutput.json({"type": "array", "items": {"type": "integer"}, "minItems": 60})


class Session:
    """An engine with twelve requests, whose prompts are as long as their outputs.

    They are alternately greedy and seeded, and two are constrained.
    """

    def __init__(self, engine: Engine, tokens: int = 60) -> None:
        self.loop = EngineLoop(engine)
        self.events: list[Any] = []
        self.outputs: Outputs = {}
        self.metrics = EngineMetrics(
            device_blocks=engine.info.device_blocks, block_size=16, block_bytes=engine.info.cpu_block_bytes
        )
        for number in range(12):
            params = SamplingParams(
                max_tokens=tokens,
                ignore_eos=True,
                logprobs=1 if number == 3 else None,
                structured_outputs=NUMBERS if number in (4, 7) else None,
                **({"temperature": 0.9, "seed": number} if number % 2 else {"temperature": 0.0}),
            )
            self.loop.add(number, [5 + (number * 31 + place * 7) % 500 for place in range(60)], params)

    def step(self) -> None:
        events = self.loop.step()
        self.metrics.observe(events)
        self.events += events
        for event in events:
            if isinstance(event, Token):
                self.outputs.setdefault(event.request.id, []).append(event.token)

    def run(self) -> Outputs:
        while not self.loop.idle:
            self.step()
        kv = self.loop.core.kv
        kv.check()
        assert kv.device_free == kv.device_total
        assert kv.tiers.cpu_free == kv.tiers.cpu_total
        return self.outputs

    def count(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.events)


@pytest.fixture(scope="module")
def expected() -> Outputs:
    engine = assemble(config(1, 1, recipe="fcfs"))
    try:
        return Session(engine).run()
    finally:
        engine.executor.close()


@pytest.mark.parametrize(
    ("tp", "pp", "recipe"),
    [(2, 1, "fastserve"), exhaustive(2, 2, SPELLED["mlfq"])],
)
def test_killed_ranks_change_no_tokens_and_ranks_out_of_step_end(
    tp: int, pp: int, recipe: str, expected: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory holds a fifth of the requests, so that they are also swapped and dropped. Ranks fork from this process.

    An altered plan is not the loss of a rank: the ranks are not restarted, and it yields no token.
    """
    monkeypatch.setattr(own_ranks, "subprocess", as_module(ForkedRank))
    less = {"kv_cache_gib": 0.6 * PRESSED["kv_cache_gib"]}
    engine = assemble(config(tp, pp, recipe=recipe, recipe_params={"starvation_s": 0.2}, **less))
    try:
        assert [rank.nice() for rank in ranks()] == [psutil.Process().nice()] * (tp * pp)
        session = Session(engine)
        while len(session.events) < 200:
            session.step()
        ranks()[-1].kill()
        assert session.run() == expected
        assert session.count(Restarted) == 1
        assert session.count(Finished) == 12
        assert session.count(Preempted) > 12
        row = session.metrics.snapshot().summed
        assert row("engine_restarts_total") == [1]
        assert row("generation_tokens_total") == [12 * 60]
        if pp == 1:  # with stages, dropping may be cheaper
            assert row("swap_out_bytes_total") != [0, 0]

        again = Session(engine)
        again.step()
        unaltered = again.count(Planned)
        link = engine.executor._live.executor._links[1]
        send = link.send
        monkeypatch.setattr(link, "send", lambda message: send(message[:-1] + bytes([message[-1] ^ 1])))
        with pytest.raises(OutOfStepError, match=r"rank 1 .*checksum of all plans"):
            again.run()
        assert again.count(Computed) <= unaltered
        assert again.count(Restarted) == 0
        for number, tokens in again.outputs.items():
            assert tokens == expected[number][: len(tokens)]
    finally:
        engine.executor.close()
    wait_until_gone()


@pytest.mark.exhaustive  # the test before kills busy ranks, too
def test_single_rank_restarts_while_idle(expected: Outputs) -> None:
    engine = assemble(config(1, 1, distributed_executor_backend="mp", pipeline_depth=2))
    try:
        session = Session(engine)
        assert session.run() == expected
        ranks()[0].kill()
        deadline = time.monotonic() + 30
        while not session.count(Restarted) and time.monotonic() < deadline:
            session.step()  # idle engines must notice as well
        assert session.count(Restarted) == 1
        again = Session(engine)
        assert again.run() == expected
        assert again.count(Restarted) == 0
    finally:
        engine.executor.close()
    wait_until_gone()


def test_a_lost_process_is_named_and_ends_its_calls(caplog: pytest.LogCaptureFixture) -> None:
    started = OwnRanks([{}, {}])
    try:
        assert started.answers([started.begin(rank, "open_store") for rank in (0, 1)])[0][0] == "127.0.0.1"
        with pytest.raises(RankError, match="a rank cannot start: TypeError: "):
            started.answers([started.begin(0, "open_store", "superfluous")])
        assert any(record.getMessage().startswith("rank 0: a rank cannot start") for record in caplog.records)
        loading = started.begin(1, "progress")  # imports torch first
        ranks()[1].send_signal(signal.SIGSEGV)
        for _ in range(2):
            with pytest.raises(RankError, match="a rank was lost: the process of rank 1 was killed by SIGSEGV"):
                started.answers([loading])
            loading = started.begin(1, "progress")
        assert started.answers([started.begin(0, "open_store")])
    finally:
        started.close()
    assert not ranks()
    assert sum("was killed by" in record.getMessage() for record in caplog.records) == 1


def test_each_rank_sees_a_card_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[dict[str, str]]] = []
    monkeypatch.setattr(own_ranks, "choose_device", lambda device: "cuda")
    monkeypatch.setattr(own_ranks, "cuda_facts", lambda: CudaFacts(cards=(Card("H100", (9, 0)),) * 3))
    monkeypatch.setattr(own_ranks, "OwnRanks", seen.append)
    for given in ("2,GPU-8f6e,5,7", None):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if given is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        OwnLauncher().start(GroupSizes(2, 1), "auto", 0.0)
        with pytest.raises(RankError, match=r"size 2 x .*size 2 needs 4 GPUs, this machine has 3 that can be used"):
            OwnLauncher().start(GroupSizes(2, 2), "auto", 0.0)
    names = [[environment["CUDA_VISIBLE_DEVICES"] for environment in environments] for environments in seen]
    assert names == [["2", "GPU-8f6e"], ["0", "1"]]


def test_profile_measures_the_ranks() -> None:
    engine = assemble(config(1, 2, swap_dtype="int8"))
    try:
        assert [part.stage for part in engine.executor.rank_specs] == [0, 1]
        whole = assemble(config(1, 1, swap_dtype="int8"))
        assert sum(part.block_bytes for part in engine.executor.rank_specs) == whole.info.block_bytes
        assert sum(part.cpu_block_bytes for part in engine.executor.rank_specs) == whole.info.cpu_block_bytes
        # Blocks of 16 float32 tokens take 20 bytes on the CPU tier in place of 64.
        assert (engine.info.device_blocks, engine.info.cpu_blocks) == (80, 192) == whole.executor.pools[:2]
        engine.executor.touch(range(4))
        transfers = engine.executor.transfers(0.05)
        assert all(transfer.block > 0 for transfer in transfers.values())
        assert engine.executor.submit(StepPlan(0, ()), 0.0).result().tokens == []
        whole.executor.close()
    finally:
        engine.executor.close()
    wait_until_gone()


REFUSED = [
    (
        {"tensor_parallel_size": 3},
        ModelError,
        r"tensor_parallel_size must divide .* attention heads, got 3; the nearest",
    ),
    ({"pipeline_parallel_size": 64}, ModelError, r"pipeline_parallel_size must be in \[1, \d+\], .*got 64"),
    ({"tensor_parallel_size": 2, "ray_address": "nowhere"}, ConfigError, "ray_address must be host:port"),
    exhaustive(
        {"distributed_executor_backend": "mp", "swap_space_gib": 1e5},
        ConfigError,
        r"swap_space_gib must be at most .* \(the machine has",
    ),
    exhaustive(
        {"distributed_executor_backend": "mp", "kv_cache_gib": 1e-4}, ConfigError, "set kv_cache_gib to at least"
    ),
]


@pytest.mark.parametrize(("settings", "kind", "message"), REFUSED)
def test_invalid_configurations_are_rejected_and_leave_no_processes(
    settings: dict[str, Any], kind: type, message: str
) -> None:
    with pytest.raises(kind, match=message):
        assemble(dataclasses.replace(config(1, 1), **settings))
    wait_until_gone()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 0}, r"tensor_parallel_size must be in \[1, 1024\], got 0"),
        ({"max_restarts": -1}, r"max_restarts must be in \[0, 1000\], got -1"),
        ({"distributed_executor_backend": "dp"}, "distributed_executor_backend must be one of auto, mp, ray, got 'dp'"),
        ({"distributed_executor_backend": "mp", "ray_address": "127.0.0.1:6379"}, "backend must be auto or ray"),
        ({"ray_address": "127.0.0.1:6379"}, "ray_address is for several ranks"),
        ({"pipeline_parallel_size": 2, "pipeline_depth": 2}, "pipeline_depth must not be set together with"),
    ],
)
def test_contradictory_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)
