"""Requests chosen by the distance between their demand and the remaining compute and KV of a step."""

from __future__ import annotations

from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.engine import EngineCore
from skipjoin.core.forecast import Forecast
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.recipes import Settings
from support.load import make
from support.policies import UnitCost
from support.recipes import build

# Prompt and output tokens of each request. Its KV is their sum less one, because the last token is never computed. A
# step has 100 tokens and the pool 100 blocks of one token, so demands are percentages:
# (10, 20), (60, 70), (20, 90), (30, 30).
SIZES = [(10, 11), (60, 11), (20, 71), (30, 1)]


def test_the_closest_request_is_chosen_until_none_fits() -> None:
    """The distances from (100, 100) are 1.20, 0.50, 0.81 and 0.99, so the second request is chosen. From the remaining
    (40, 30) they are 0.32, too large, too large and 0.10, so the fourth follows. Then no block is left."""
    policies = build("multires", Settings(UnitCost(), 8, 100), {"padding": 0.0, "forward_tokens": 100})
    core = EngineCore(Scheduler(policies, KVLedger(100, 0, 1)))
    for number, (prompt, tokens) in enumerate(SIZES):
        core.add(make(number, prompt, tokens, forecast=Forecast(tokens, "test")), 0.0)
    plan = core.start_step(0.0)
    assert [(piece.request.id, piece.tokens) for piece in plan.slices] == [(1, 60), (3, 30)]
    assert [request.id for request in policies.ordering.ranked(0.0)] == [1, 3, 0, 2]
    assert core.kv.available == 0
