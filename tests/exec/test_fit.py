"""Fitting a linear cost to measured times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipjoin.core.step import StepShape
from skipjoin.engine.profiling.cases import HELD_OUT_EVERY, Case, Limits, cases
from skipjoin.exec.fit import cost_errors, fit_cost, fit_times
from skipjoin.policies.cost import LinearCost

LIMITS = Limits(tokens=2048, requests=128, positions=1024, kv_tokens=65536)


def shape_of(case: Case) -> StepShape:
    long = [(start, tokens) for start, tokens in case.slices if tokens > 1]
    short = [start for start, tokens in case.slices if tokens == 1]
    pairs = sum(tokens * start + tokens * (tokens + 1) // 2 for start, tokens in long)
    return StepShape(sum(tokens for _, tokens in long), pairs, len(short), sum(short) + len(short))


SHAPES = [shape_of(case) for case in cases(LIMITS, 12)]
TERMS = st.builds(
    LinearCost,
    st.floats(1e-4, 1e-1),
    st.floats(0, 1e-3),
    st.floats(0, 1e-6),
    st.floats(0, 1e-3),
    st.floats(0, 1e-5),
    weights=st.floats(0, 1e-1),
)


@settings(max_examples=2)
@given(truth=TERMS)
def test_fit_reproduces_exact_times_closely(truth: LinearCost) -> None:
    seconds = [truth.step(shape) for shape in SHAPES]
    errors = cost_errors(fit_cost(SHAPES, seconds), SHAPES, seconds)
    # The fit searches for the steps that the reading of weights dominates, instead of solving for them.
    assert np.median(errors) < 0.01
    assert np.quantile(errors, 0.95) < 0.1


def test_fit_reproduces_exact_cpu_times() -> None:
    truth = LinearCost(2e-3, 5e-4, 4e-7, 4e-4, 2e-6, weights=8e-3)
    seconds = [truth.step(shape) for shape in SHAPES]
    assert max(cost_errors(fit_cost(SHAPES, seconds), SHAPES, seconds)) < 1e-6


@settings(max_examples=2)
@given(truth=TERMS, seed=st.integers(0, 1000))
def test_fit_is_robust_to_outliers_and_noise(truth: LinearCost, seed: int) -> None:
    draw = np.random.default_rng(seed)
    exact = np.array([truth.step(shape) for shape in SHAPES])
    seconds = exact * np.exp(draw.normal(0, 0.05, len(exact)))
    seconds[draw.choice(len(exact), 5, replace=False)] *= 10
    errors = cost_errors(fit_cost(SHAPES, seconds.tolist()), SHAPES, exact.tolist())
    assert np.quantile(errors, 0.95) < 0.25


def test_fit_follows_the_experts_that_steps_read() -> None:
    experts = {"expert_part": 0.9, "expert_use": 0.125}
    truth = LinearCost(2e-3, 5e-4, 4e-7, 4e-4, 2e-6, weights=8e-3, **experts)
    seconds = [truth.step(shape) for shape in SHAPES]
    assert max(cost_errors(fit_cost(SHAPES, seconds, **experts), SHAPES, seconds)) < 1e-6
    assert max(cost_errors(fit_cost(SHAPES, seconds), SHAPES, seconds)) > 0.1


def test_negative_terms_are_clamped_and_the_others_refitted() -> None:
    # Times decrease with the third count, so that its coefficient would be negative.
    counts = np.array([[1.0, x, y] for x in (1, 2, 4, 8) for y in (0, 1, 2)])
    seconds = counts @ np.array([1.0, 0.5, -0.1])
    found = fit_times(counts, seconds)
    alone = fit_times(counts[:, :2], seconds)
    assert found[2] == 0
    assert found[:2].tolist() == pytest.approx(alone.tolist())


@given(
    tokens=st.integers(1, 4096),
    requests=st.integers(1, 512),
    positions=st.integers(1, 4096),
    kv_share=st.floats(1, 50),
)
def test_every_case_is_a_valid_engine_step(tokens: int, requests: int, positions: int, kv_share: float) -> None:
    limits = Limits(tokens, requests, positions, int(positions * kv_share))
    found = cases(limits, 12)
    assert found[0] == Case(((0, 1),), False)
    assert len({case.slices for case in found}) == len(found)
    for case in found:
        assert 1 <= len(case.slices) <= requests
        assert sum(count for _, count in case.slices) <= tokens
        assert sum(start + count for start, count in case.slices) <= limits.kv_tokens
        assert all(start >= 0 and count >= 1 and start + count <= positions for start, count in case.slices)


def test_every_prefix_covers_all_kinds_and_sizes() -> None:
    first = cases(LIMITS, 12)[:20]
    shapes = [shape_of(case) for case in first]
    for kind in (
        lambda shape: shape.decodes and not shape.prefill,
        lambda shape: shape.prefill and not shape.decodes,
        lambda shape: shape.prefill and shape.decodes,
    ):
        of_kind = [shape for shape in shapes if kind(shape)]
        assert len(of_kind) >= 4
    prefills, decodes = ({getattr(shape, name) for shape in shapes} for name in ("prefill", "decodes"))
    assert min(prefills - {0}) <= 16
    assert max(prefills) >= 256
    assert min(decodes - {0}) <= 4
    assert max(decodes) >= 32
    assert any(start > 0 and tokens > 1 for case in first for start, tokens in case.slices)


def test_a_third_of_every_kind_is_held_out() -> None:
    found = cases(LIMITS, 12)
    held_out = [shape_of(case) for case in found if case.held_out]
    assert len(held_out) == pytest.approx(len(found) / HELD_OUT_EVERY, abs=2)
    assert any(shape.prefill and shape.decodes for shape in held_out)
    assert any(shape.prefill and not shape.decodes for shape in held_out)
    assert any(shape.decodes and not shape.prefill for shape in held_out)
