from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from skipjoin.core.step import StepShape
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.forward import saturating_tokens


def rate(cost: LinearCost, tokens: int) -> float:
    return tokens / cost.step(StepShape(prefill=tokens))


@given(
    st.floats(1e-5, 0.1),
    st.floats(0, 0.1),
    st.floats(0, 1e-2),
    st.integers(1, 400),
    st.sampled_from([0.5, 0.9, 0.99, 1.0]),
)
def test_the_target_is_the_smallest_size_near_the_best_rate(
    floor: float, weights: float, token: float, most: int, share: float
) -> None:
    cost = LinearCost(floor=floor, weights=weights, prefill_token=token)
    found = saturating_tokens(cost, most, share=share)
    best = max(rate(cost, tokens) for tokens in range(1, most + 1))
    assert 1 <= found <= most
    assert rate(cost, found) >= share * best * (1 - 1e-12)
    assert found == 1 or rate(cost, found - 1) < share * best * (1 + 1e-12)


@dataclass
class Tiles:
    """Cost model whose steps take whole tiles of tokens; more than 2,000 tokens exceed a cache."""

    calls: int = 0
    revision: int = 0

    def step(self, shape: StepShape) -> float:
        self.calls += 1
        return 0.001 + 0.002 * -(-shape.prefill // 128) + (1.0 if shape.prefill > 2000 else 0.0)

    def transfer(self, blocks: int) -> float:
        return 0.0


def test_a_falling_rate_above_the_cache_size_is_handled() -> None:
    cost = Tiles()
    found = saturating_tokens(cost, 100_000)
    assert cost.calls < 100
    assert found <= 1920
    assert rate(cost, found) >= 0.9 * 0.95 * rate(cost, 1920)  # type: ignore[arg-type]  # the grid misses the best one
