"""Models on ranks that Ray places: the same tokens as in one process, whatever is killed, and nothing left behind.

All of it runs on one cluster on this machine, which pytest's own process starts.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from skipjoin.config import ConfigError, EngineConfig
from skipjoin.core.events import Finished, Preempted, Restarted, Token
from skipjoin.core.step import StepPlan
from skipjoin.engine.build import Engine, assemble
from skipjoin.engine.loop import EngineLoop
from skipjoin.exec.base import RankError
from skipjoin.exec.ranks.cluster import Cluster
from skipjoin.exec.ranks.plan_messages import OutOfStepError
from skipjoin.model.config import ModelError
from skipjoin.observe.metrics import EngineMetrics
from skipjoin.sampling import SamplingParams
from support.recipes import SPELLED

pytestmark = pytest.mark.ray
pytest.importorskip("ray")

RANKS = 4
# A KV pool in which four of the requests fit, and a host pool for as many.
PRESSED = {"kv_cache_gib": 80 * 65536 / 2**30, "swap_space_gib": 60 * 65536 / 2**30, "max_model_len": 256}
Outputs = dict[int, list[int]]


# What a user may have set for other clusters.
INHERITED = {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "known to others"}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in INHERITED.items():
            patch.setenv(name, value)
        started = Cluster.start(RANKS)
        yield started
        started.close()
        assert {name: os.environ[name] for name in INHERITED} == INHERITED


def config(tp: int, pp: int, **settings: Any) -> EngineConfig:
    common = {"dtype": "float32", "profile": "off", "threads": 1, "seed": 4, **PRESSED, **settings}
    return EngineConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp, **common)


def ranks() -> list[psutil.Process]:
    """Processes of ranks, whoever started them."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended since
            if "RankActor" in one.name():
                found.append(one)
    return found


def wait_until_gone(seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while ranks():
        assert time.monotonic() < deadline, ranks()
        time.sleep(0.05)


class Session:
    """An engine with twelve requests, greedy and seeded in turn, whose prompts are as long as their outputs."""

    def __init__(self, engine: Engine, tokens: int = 60) -> None:
        self.loop = EngineLoop(engine)
        self.events: list[Any] = []
        self.outputs: Outputs = {}
        self.metrics = EngineMetrics(
            device_blocks=engine.info.device_blocks, block_size=16, block_bytes=engine.info.host_block_bytes
        )
        for number in range(12):
            params = SamplingParams(
                max_tokens=tokens,
                ignore_eos=True,
                logprobs=1 if number == 3 else None,
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
        assert kv.cpu_free == kv.cpu_total
        return self.outputs

    def count(self, kind: type) -> int:
        return sum(isinstance(event, kind) for event in self.events)


# -- a private cluster is closed to all but this process and those that it starts -------------------------------------


def test_no_other_user_can_enter_its_folder(cluster: Cluster) -> None:
    """What lies in it is open to all, so that a name that leads into it must not be."""
    (folder,) = Path(tempfile.gettempdir()).glob(f"skipjoin-ray-{os.getpid()}-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [inside.name for inside in folder.iterdir()] == ["ray"]
    assert list(folder.glob("ray/session_2*/sockets/*"))


@pytest.mark.parametrize(
    ("stated", "joins"),
    [({}, True), ({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": ""}, False), ({"RAY_AUTH_TOKEN": "other"}, False)],
)
def test_a_process_without_its_token_is_refused(cluster: Cluster, stated: dict[str, str], joins: bool) -> None:
    program = (
        "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1]).internal_kv_keys(b'', None, 5)"
    )
    command = (sys.executable, "-c", program, cluster.address)
    run = subprocess.run(command, env=os.environ | stated, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode == 0) is joins, run.stderr
    assert joins or "nauthenticated" in run.stderr, run.stderr


def test_all_its_processes_listen_on_the_loopback_interface() -> None:
    listening = []
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            listening += [one.laddr.ip for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
    assert len(listening) > 5
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}


@pytest.fixture(scope="module")
def expected() -> Outputs:
    """What one process says."""
    engine = assemble(config(1, 1, recipe="fcfs"))
    try:
        return Session(engine).run()
    finally:
        engine.executor.close()


@pytest.mark.parametrize(("tp", "pp", "recipe"), [(2, 1, "fastserve"), (2, 2, SPELLED["mlfq"])])
def test_the_same_tokens_whatever_is_killed(tp: int, pp: int, recipe: str, expected: Outputs) -> None:
    """With memory for a third of the requests, so that they are swapped and dropped besides. The second death within
    ten minutes is one too many; what was generated until then stands."""
    engine = assemble(config(tp, pp, recipe=recipe, recipe_params={"starvation_s": 0.2}, max_restarts=1))
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
        if pp == 1:  # elsewhere dropping may be cheaper
            assert row("swap_out_bytes_total") != [0, 0]

        again = Session(engine)
        while len(again.outputs) < 3:
            again.step()
        ranks()[0].kill()
        with pytest.raises(RankError, match=r"rank \d.*max_restarts 1 within 10 minutes is reached"):
            again.run()
        for number, tokens in again.outputs.items():
            assert tokens == expected[number][: len(tokens)]
        with pytest.raises(RankError, match="the ranks are not running"):
            again.loop.step()
    finally:
        engine.executor.close()
    wait_until_gone()


def test_one_rank_of_its_own_may_die_as_well_at_work_and_idle(expected: Outputs) -> None:
    engine = assemble(config(1, 1, distributed_executor_backend="ray", pipeline_depth=2))
    try:
        session = Session(engine)
        while len(session.events) < 300:
            session.step()
        ranks()[0].kill()
        assert session.run() == expected
        assert session.count(Restarted) == 1
        ranks()[0].kill()
        deadline = time.monotonic() + 30
        while session.count(Restarted) < 2 and time.monotonic() < deadline:
            session.step()  # nothing to do, and it notices all the same
        again = Session(engine)
        assert again.run() == expected
        assert again.count(Restarted) == 0
    finally:
        engine.executor.close()
    wait_until_gone()


def test_a_rank_that_is_out_of_step_stops_the_engine_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that changed on its way is no death of a rank: nothing is started anew, and no token comes of it."""
    engine = assemble(config(2, 1))
    try:
        session = Session(engine)
        session.step()
        link = engine.executor._live.executor._links[1]
        send = link.send
        monkeypatch.setattr(link, "send", lambda message: send(message[:-1] + bytes([message[-1] ^ 1])))
        before = {number: list(tokens) for number, tokens in session.outputs.items()}
        with pytest.raises(OutOfStepError, match=r"rank 1 .*checksum of all plans"):
            session.run()
        assert session.outputs == before
    finally:
        engine.executor.close()
    wait_until_gone()


def test_a_profile_of_ranks_is_theirs() -> None:
    engine = assemble(config(1, 2, swap_dtype="int8"))
    try:
        assert [part.stage for part in engine.executor.rank_specs] == [0, 1]
        whole = assemble(config(1, 1, swap_dtype="int8"))
        assert sum(part.block_bytes for part in engine.executor.rank_specs) == whole.info.block_bytes
        assert sum(part.host_block_bytes for part in engine.executor.rank_specs) == whole.info.host_block_bytes
        # Of float32, with 16 tokens a block: 20 bytes in place of 64.
        assert (engine.info.device_blocks, engine.info.host_blocks) == (80, 192) == whole.executor.pools[:2]
        engine.executor.touch(4)
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
    (
        {"tensor_parallel_size": 4, "pipeline_parallel_size": 2},
        ConfigError,
        r"4 x pipeline_parallel_size 2 needs 2 times 4 CPUs",
    ),
    ({"tensor_parallel_size": 2, "ray_address": "nowhere"}, ConfigError, "ray_address must be host:port"),
    ({"tensor_parallel_size": 2, "ray_address": "127.0.0.1:1"}, ConfigError, "this process already uses Ray at 127"),
    (
        {"tensor_parallel_size": 2, "swap_space_gib": 1e5},
        ConfigError,
        r"swap_space_gib must be at most .* \(a rank can have",
    ),
    ({"tensor_parallel_size": 2, "kv_cache_gib": 1e-4}, ConfigError, "set kv_cache_gib to at least"),
]


@pytest.mark.parametrize(("settings", "kind", "message"), REFUSED)
def test_what_cannot_be_is_refused_and_leaves_nothing(settings: dict[str, Any], kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        assemble(dataclasses.replace(config(1, 1), **settings))
    wait_until_gone()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 0}, r"tensor_parallel_size must be in \[1, 1024\], got 0"),
        ({"max_restarts": -1}, r"max_restarts must be in \[0, 1000\], got -1"),
        ({"distributed_executor_backend": "mp"}, "distributed_executor_backend must be one of auto, ray, got 'mp'"),
        ({"ray_address": "127.0.0.1:6379"}, "ray_address is for several ranks"),
        ({"pipeline_parallel_size": 2, "pipeline_depth": 2}, "pipeline_depth must not be set beside"),
    ],
)
def test_settings_that_contradict_themselves(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)
