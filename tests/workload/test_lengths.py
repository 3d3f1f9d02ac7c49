from __future__ import annotations

import os
import random
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.config import ConfigError
from skipjoin.workload.lengths import BUILT_IN, QuantileTable, parse_lengths, read_table
from support.scripts import load

TRACES = os.environ.get("SKIPJOIN_TRACES")
DRAWS = 50_000
SIDES = ("prompt", "output")
# The paper does not say which rows of LMSYS-Chat-1M it used; the table has the distribution of the measured rows.
FAR_FROM_PUBLISHED = {("lmsys", "output"): 0.13}
# It made the tables.
tool = load("tools/make_length_tables.py")
every_table = pytest.mark.parametrize("name", BUILT_IN)


def sample(text: str, count: int = DRAWS, seed: int = 0) -> list[tuple[int, int]]:
    lengths, rng = parse_lengths(text), random.Random(seed)
    return [lengths.draw(rng) for _ in range(count)]


def distance(one: Sequence[int], other: Sequence[int]) -> float:
    """Return the Kolmogorov-Smirnov distance, the largest difference of the empirical distribution functions."""
    one, other = sorted(one), sorted(other)
    return max(
        abs(bisect_right(one, value) / len(one) - bisect_right(other, value) / len(other)) for value in {*one, *other}
    )


@every_table
def test_a_table_has_the_moments_and_quantiles_of_its_source(name: str) -> None:
    measured, drawn = read_table(name)["measured"], tool.moments(sample(name))
    for side, exact in zip(SIDES, parse_lengths(name).mean(), strict=True):
        assert exact == pytest.approx(measured[side]["mean"], rel=0.005)
        assert drawn[side]["mean"] == pytest.approx(measured[side]["mean"], rel=0.02)
        assert drawn[side]["std"] == pytest.approx(measured[side]["std"], rel=0.05)
        for percent in (5, 25, 50, 75, 95, 99):
            assert drawn[side][f"p{percent}"] == pytest.approx(measured[side][f"p{percent}"], rel=0.05, abs=1)
    assert drawn["rank_correlation"] == pytest.approx(measured["rank_correlation"], abs=0.02)


@every_table
def test_a_table_has_the_published_means(name: str) -> None:
    published = read_table(name)["published"]
    for side, mean in zip(SIDES, parse_lengths(name).mean(), strict=True):
        assert mean == pytest.approx(published[side], rel=FAR_FROM_PUBLISHED.get((name, side), 0.06))


def test_lmsys_has_the_published_mean_with_the_documented_factor() -> None:
    text = "lmsys*1,1.14"
    assert text in read_table("lmsys")["caveat"]
    assert parse_lengths(text).mean()[1] == pytest.approx(read_table("lmsys")["published"]["output"], rel=0.01)


@every_table
def test_a_table_names_its_source(name: str) -> None:
    table = read_table(name)
    assert all(table[entry] for entry in ("source", "license", "rows", "method"))
    assert table["published"]["where"]


def test_a_table_preserves_the_joint_distribution() -> None:
    """Outputs grow with the prompt, so the pairs must match and not only the two marginals."""
    pairs = [(prompt, 10 * prompt + step) for prompt in range(1, 401) for step in range(10)]
    table = tool.make_table(pairs, tool.SOURCES["alpaca"])
    lengths = QuantileTable.of("made", table)
    rng = random.Random(3)
    drawn = [lengths.draw(rng) for _ in range(4000)]
    # A bin holds 10 prompts, so the outputs of a bin are spread over 110 tokens.
    assert max(abs(output - 10 * prompt) for prompt, output in drawn) <= 110
    assert distance([prompt for prompt, _ in drawn], [prompt for prompt, _ in pairs]) < 0.03


@pytest.mark.shared
@pytest.mark.skipif(TRACES is None, reason="SKIPJOIN_TRACES names no folder")
@every_table
def test_a_table_matches_its_source_file(name: str) -> None:
    pairs, drawn = tool.read_pairs(Path(str(TRACES)) / tool.SOURCES[name].file), sample(name)
    for value_of in (lambda pair: pair[0], lambda pair: pair[1], sum, lambda pair: pair[0] - pair[1]):
        # 1.63 * sqrt(1 / 10,000 + 1 / 50,000) = 0.018 bounds the distance of two samples of one distribution.
        assert distance([value_of(pair) for pair in drawn], [value_of(pair) for pair in pairs]) < 0.018
    made = tool.make_table(pairs, tool.SOURCES[name])
    assert tool.as_text(made) == tool.as_text(read_table(name))


@given(
    prompt=st.tuples(st.integers(1, 5000), st.integers(0, 5000)),
    output=st.tuples(st.integers(1, 5000), st.integers(0, 5000)),
    seed=st.integers(0, 1000),
)
def test_uniform_lengths_stay_in_range(prompt: tuple[int, int], output: tuple[int, int], seed: int) -> None:
    text = f"uniform:{prompt[0]}-{sum(prompt)},{output[0]}-{sum(output)}"
    for one, other in sample(text, 20, seed):
        assert prompt[0] <= one <= sum(prompt)
        assert output[0] <= other <= sum(output)


def test_uniform_lengths_include_both_ends() -> None:
    drawn = sample("uniform:3-5,1-2", 6000)
    assert sorted({*drawn}) == [(prompt, output) for prompt in (3, 4, 5) for output in (1, 2)]
    assert all(drawn.count(pair) == pytest.approx(1000, rel=0.1) for pair in {*drawn})


def test_fixed_lengths_are_constant() -> None:
    assert {*sample("fixed:128,64", 50)} == {(128, 64)}
    assert parse_lengths("fixed:128,64").mean() == (128, 64)


@pytest.mark.parametrize("base", [*BUILT_IN, "uniform:40-400,20-60"])
@given(prompt=st.floats(0.001, 20), output=st.floats(0.001, 20), seed=st.integers(0, 1000))
def test_scaling_multiplies_every_draw_and_keeps_it_positive(
    base: str, prompt: float, output: float, seed: int
) -> None:
    """Both draws use the same random numbers, so they differ by the factor and by rounding only."""
    scaled = sample(f"{base}*{prompt},{output}", 20, seed)
    for small, large in zip(scaled, sample(base, 20, seed), strict=True):
        for side, factor in enumerate((prompt, output)):
            assert small[side] >= 1
            assert small[side] == pytest.approx(max(1, large[side] * factor), abs=1 + 1.5 * factor)


def test_one_factor_scales_both_lengths_and_the_mean_matches_the_draws() -> None:
    assert sample("sharegpt*0.25", 100) == sample("sharegpt*0.25,0.25", 100)
    whole, half = parse_lengths("bookcorpus").mean(), parse_lengths("bookcorpus*0.5").mean()
    assert half == pytest.approx((whole[0] / 2, whole[1] / 2), rel=0.001)
    for base in BUILT_IN:
        # Rounding matters most for short lengths.
        drawn, expected = sample(f"{base}*0.05"), parse_lengths(f"{base}*0.05").mean()
        for side in (0, 1):
            assert fmean(pair[side] for pair in drawn) == pytest.approx(expected[side], rel=0.02)
    # If nearly all lengths are rounded to 1, so is the mean.
    assert parse_lengths("alpaca*0.001").mean() == pytest.approx((1, 1), rel=0.001)


@pytest.mark.parametrize("text", ["sharegpt", "lmsys*0.5", "alpaca*0.25,2", "uniform:64-128,16-32", "fixed:128,64"])
def test_the_name_parses_to_the_same_lengths(text: str) -> None:
    lengths = parse_lengths(f" {text} ")
    assert lengths.name == text
    assert parse_lengths(lengths.name) == lengths


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sharegtp", "no 'sharegtp'; did you mean sharegpt?"),
        ("", "choose from alpaca, bookcorpus, fixed, lmsys, sharegpt, trace:FILE, uniform"),
        ("alpaca:5", "no 'alpaca:5'"),
        ("uniform:64-128", "takes prompt and output tokens"),
        ("uniform:128-64,16-32", "the prompt range must not end below its start, got '128-64'"),
        ("uniform:64-128,32", "the output range must be LOW-HIGH, got '32'"),
        ("uniform:0-128,1-2", "prompt tokens must be an integer in [1, 999999999], got '0'"),
        ("fixed:128,x", "output tokens must be an integer in [1, 999999999], got 'x'"),
        ("fixed:128,-3", "got '-3'"),
        ("fixed:128", "takes prompt and output tokens"),
        ("sharegpt*", "the factor after * must be a number, got ''"),
        ("sharegpt*0", "must be in (0, 1e+06], got 0.0"),
        ("sharegpt*nan", "got nan"),
        ("sharegpt*1,2,3", "one or two factors"),
    ],
)
def test_errors_name_the_field(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_lengths(text)
    assert message in str(caught.value)


def test_lengths_can_be_drawn_from_a_trace(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("prompt_tokens,output_tokens\n10,5\n20,7\n40,9\n")
    lengths = parse_lengths(f"trace:{file}")
    assert lengths.name == "trace:rows.csv"
    assert lengths.mean() == (70 / 3, 7)
    assert set(sample(f"trace:{file}", 100)) == {(10, 5), (20, 7), (40, 9)}
    half = parse_lengths(f"trace:{file}*0.5")
    assert half.name == "trace:rows.csv*0.5"
    assert half.draw(random.Random(1))[0] * 2 == lengths.draw(random.Random(1))[0]
