from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from engines import CONFIGS, Restless, SwapAll, engine, make_core, mixed_requests, run
from rank_links import GROUP_S, LAYERS, Processes, processes
from test_invisible_preemption import happened
from torch import distributed

from skipjoin.core.events import Preemption
from skipjoin.exec.base import RankError
from skipjoin.model.loader import random_model
from skipjoin.model.parallel import GroupError, Shard
from skipjoin.model.torch_group import TorchGroup
from skipjoin.policies.eviction import Recompute
from support.worlds import one_in

pytestmark = pytest.mark.timeout(240)
LAYOUTS = {"tp 2": (2, 1), "pp 2": (1, 2), "tp 2 x pp 2": (2, 2)}
# How requests are forced off the device. A pipeline keeps as many plans in flight as it has stages.
SWAPPED = dict(eviction=SwapAll, device_blocks=14, cpu_blocks=60, slots=3, chunk=7)
MOVED = dict(eviction=lambda: Restless(5), device_blocks=20, cpu_blocks=40, slots=3, chunk=9)
FORCED = {"swapped": SWAPPED, "moved concurrently": MOVED}
EXPECTED = {
    "swapped": {"moved out blocking", "moved in blocking"},
    "moved concurrently": {"moved out overlapped", "moved in overlapped"},
}


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(*LAYOUTS[request.param], tmp_path_factory.mktemp("ranks")) as started:
        yield started


@cache
def outputs_of_one_process(family: str) -> list[list[int]]:
    model = random_model(CONFIGS[family] | {"num_hidden_layers": LAYERS}, seed=3)
    requests = mixed_requests()
    run(*engine(model, Recompute(), device_blocks=60, slots=4), requests)
    return [request.progress.output for request in requests]


# test_parallel_families.py has all families.
@pytest.mark.parametrize("family", one_in(4, CONFIGS))
def test_several_processes_produce_the_tokens_of_one(ranks: Processes, family: str) -> None:
    # The families alternate between the cases, and every layout has both.
    case = list(FORCED)[(list(CONFIGS).index(family) // 4 + ranks.tp) % 2]
    options = dict(FORCED[case])
    core = make_core(options.pop("eviction")(), **options, depth=ranks.pp)
    executor = ranks.executor(family, device_blocks=options["device_blocks"], cpu_blocks=options["cpu_blocks"])
    requests = mixed_requests()
    events = run(core, executor, requests)
    assert [request.progress.output for request in requests] == outputs_of_one_process(family)
    found = happened(events)
    assert found[Preemption.SWAP] >= 3
    assert all(found[what] >= 3 for what in EXPECTED[case]), found


def test_collectives_support_every_type(ranks: Processes) -> None:
    assert ranks.check_collectives() == [b""] * len(ranks.links)


@pytest.mark.parametrize("tp", [3, 4])
def test_sums_over_more_than_two_ranks_are_batch_invariant(tmp_path: Path, tp: int) -> None:
    with processes(tp, 1, tmp_path) as started:
        assert started.check_collectives() == [b""] * tp


def start_requests(processes: Processes, timeout_s: float = 30.0):
    """Return an engine in the middle of its work and a function that runs its next plans."""
    executor = processes.executor("llama", device_blocks=60)
    executor._timeout_s = timeout_s
    core = make_core(Recompute(), device_blocks=60, slots=4)
    for request in mixed_requests():
        core.add(request, 0.0)

    def step(count: int) -> None:
        for _ in range(count):
            plan = core.start_step(0.0)
            assert plan is not None
            core.finish_step(executor.submit(plan, 0.0).result(), 0.0)

    step(3)
    return step


def test_joining_a_group_without_peers_times_out(tmp_path: Path) -> None:
    store = distributed.FileStore(str(tmp_path / "meeting"), 2)
    begin = time.monotonic()
    with pytest.raises(GroupError, match=r"rank 0 .* failed in joining the group"):
        TorchGroup(Shard(tp_size=2), store, timeout_s=1.0)
    assert time.monotonic() - begin < GROUP_S


@pytest.mark.parametrize("layout", ["tp 2", "pp 2"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_detected_at_once(tmp_path: Path, layout: str, victim: int) -> None:
    with processes(*LAYOUTS[layout], tmp_path) as started:
        step = start_requests(started)
        os.kill(started.links[victim].process.pid or 0, signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(RankError, match=rf"process \d+ is gone|rank {1 - victim} .* failed: GroupError"):
            step(3)
        assert time.monotonic() - begin < GROUP_S / 2


def test_a_hanging_rank_times_out(tmp_path: Path) -> None:
    with processes(2, 1, tmp_path) as started:
        step = start_requests(started, timeout_s=1.0)
        os.kill(started.links[1].process.pid or 0, signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(RankError, match=r"rank 0 .* did not answer within 1 s"):
            step(1)
        assert time.monotonic() - begin < GROUP_S / 2
        os.kill(started.links[1].process.pid or 0, signal.SIGKILL)
