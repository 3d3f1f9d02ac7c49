from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Event, Planned
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.policy_set import Policies
from skipjoin.core.request import Request
from skipjoin.exec.simulated import SimulatedExecutor
from skipjoin.policies.cost import LinearCost
from skipjoin.recipes import Settings, baselines
from skipjoin.sim.driver import Replica, simulate

ROOT = Path(__file__).parents[1]


def test_example_recipe_runs_the_smallest_request_first() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    diff = re.search(r"```diff\n(.*?)```", text, re.DOTALL)
    code = "\n".join(line.removeprefix("+") for line in diff[1].splitlines() if line.startswith("+"))
    built: dict[str, Callable[[Settings], Policies]] = {}
    names = {**vars(baselines), "recipe": lambda f: built.setdefault(f.__name__, f)}
    exec(compile("from __future__ import annotations\n" + code, "CONTRIBUTING.md", "exec"), names)
    cost = LinearCost(floor=0.01, prefill_token=1e-4)
    policies = built["smallest_request"](Settings(cost, max_seqs=1))
    core = EngineCore(Scheduler(policies, KVLedger(100, 0, 16)))
    order: list[int] = []
    requests = [Request(number, 0.0, range(length), 3) for number, length in enumerate((90, 10, 50))]

    def record(events: list[Event]) -> None:
        order.extend(event.plan.slices[0].request.id for event in events if isinstance(event, Planned))

    simulate(Replica(core, SimulatedExecutor(cost)), requests, on_events=record)
    assert order == [1] * 3 + [2] * 3 + [0] * 3
