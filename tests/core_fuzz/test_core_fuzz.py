from __future__ import annotations

from collections.abc import Callable

import pytest

from core_fuzz.draw import play
from core_fuzz.machine import Case, replay
from core_fuzz.shrink import script, shrunk
from skipjoin.core.decide.plan import StepPlanner
from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.kv.tiers import Tiers
from skipjoin.core.request import Request
from skipjoin.core.step import Move
from support.recipes import RECIPES
from support.worlds import each_recipe

SEED = 32
WORLDS = 12
# Shared blocks have the largest number of states.
MORE_WORLDS = {"bros": 50}
SHRINK_S = 60.0  # of a real finding
TRIAL_SHRINK_S = 0.3  # of a planted bug


@pytest.mark.parametrize("recipe", each_recipe())
def test_random_worlds_keep_all_invariants(recipe: str) -> None:
    for number in range(MORE_WORLDS.get(recipe, WORLDS)):
        player, finding = play(f"{SEED}/{number}", [recipe])
        if finding is not None:
            repeat = f"python -m core_fuzz --seed {SEED} --round {number} --rounds 1 --recipe {recipe}"
            pytest.fail(f"{repeat}\n{script(shrunk(player.case, finding.kind, SHRINK_S))}")


def test_the_same_seed_gives_the_same_plans() -> None:
    recipes = sorted(RECIPES)
    for number in range(8):
        one, other = play(f"{SEED}/{number}", recipes)[0], play(f"{SEED}/{number}", recipes)[0]
        assert (one.case, one.machine.trace) == (other.case, other.machine.trace)


def first_finding(recipes: list[str], count: int = 3000) -> tuple[Case, str]:
    for number in range(count):
        player, finding = play(f"{SEED}/{number}", recipes)
        if finding is not None:
            return player.case, finding.kind
    pytest.fail("no finding")


def stalls(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepPlanner, "_force", lambda self, builder: None)
    patch.setattr(StepPlanner, "_restart", lambda self: None)


def offers_planned_blocks(patch: pytest.MonkeyPatch) -> None:
    """Register prefix-cache keys when a plan is made, not when it is committed."""
    schedule = Scheduler.schedule

    def early(self: Scheduler, now: float) -> object:
        plan = schedule(self, now)
        for piece in plan.slices if plan is not None else ():
            request = piece.request
            if request.prefix is not None and piece.start + piece.tokens <= request.progress.known:
                before, request.progress.computed = request.progress.computed, piece.start + piece.tokens
                self.kv.cache.offer(request)
                request.progress.computed = before
        return plan

    patch.setattr(Scheduler, "schedule", early)


def frees_the_source_of_a_move(patch: pytest.MonkeyPatch) -> None:
    move_out = Tiers.move_out

    def unfenced(self: Tiers, request: Request, *, blocking: bool, **rest: object) -> Move | None:
        return move_out(self, request, blocking=True, **rest)  # type: ignore[arg-type]

    patch.setattr(Tiers, "move_out", unfenced)


def ignores_failed_moves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tiers, "fail", Tiers.complete)


def leaks_blocks(patch: pytest.MonkeyPatch) -> None:
    give_back = KVLedger._give_back
    patch.setattr(KVLedger, "_give_back", lambda self, held, blocks: give_back(self, held, blocks[:-1]))


@pytest.mark.parametrize(
    ("break_it", "recipe", "kinds"),
    [
        (stalls, "fastserve", {"stall"}),
        (offers_planned_blocks, "sarathi", {"wrong key"}),
        (frees_the_source_of_a_move, "fastserve", {"wrong read", "wrong key", "LedgerError in check"}),
        (ignores_failed_moves, "fastserve-reactive", {"wrong read", "wrong token", "wrong key"}),
        (leaks_blocks, "fcfs", {"LedgerError in check"}),
    ],
)
def test_the_fuzzer_finds_bugs_of_the_core(
    monkeypatch: pytest.MonkeyPatch, break_it: Callable[[pytest.MonkeyPatch], None], recipe: str, kinds: set[str]
) -> None:
    break_it(monkeypatch)
    case, kind = first_finding([recipe])
    assert kind in kinds
    smaller = shrunk(case, kind, TRIAL_SHRINK_S)
    assert len(smaller.calls) <= len(case.calls)
    found = replay(smaller)
    assert found.kind == kind


def test_a_finding_becomes_a_script_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    stalls(monkeypatch)
    case, kind = first_finding(["fastserve"])
    text = script(shrunk(case, kind, TRIAL_SHRINK_S))
    with pytest.raises(AssertionError):
        exec(compile(text, "script", "exec"), {})
