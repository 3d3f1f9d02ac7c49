"""`adaptive`'s order of SGLang's waiting requests, on requests with the fields that it reads."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.options import ConfigError
from skipjoin.sglang.order import order_of
from skipjoin.sglang.plugin import register


@dataclass
class Waiting:
    rid: str
    arrival_processed_tokens: int
    origin_input_ids: range
    num_matched_prefix_tokens: int = 0
    output_ids: list[int] = field(default_factory=list)


def waiting(rid: str, arrival: int, prompt: int, *, cached: int = 0, output: int = 0) -> Waiting:
    return Waiting(rid, arrival, range(prompt), cached, [7] * output)


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 500), st.integers(0, 500)), max_size=30),
    st.sampled_from([0.0, 1.0, 400.0]),
)
def test_no_request_is_overtaken_by_one_that_arrives_later_than_patience_allows(
    parts: list[tuple[int, int, int]], patience: float
) -> None:
    queue = [waiting(str(at), *part[:2], cached=part[2]) for at, part in enumerate(parts)]
    order_of(f"adaptive[prompt_patience={patience}]").sort(queue, set())
    for place, later in enumerate(queue):
        for overtaken in queue[place + 1 :]:
            uncached = max(0, len(overtaken.origin_input_ids) - overtaken.num_matched_prefix_tokens)
            assert later.arrival_processed_tokens <= overtaken.arrival_processed_tokens + patience * uncached


def test_short_and_cached_prompts_and_retracted_requests_precede_a_long_prompt() -> None:
    queue = [
        waiting("long", 0, 4000),
        waiting("short", 100, 10),
        waiting("cached", 100, 4000, cached=3995),
        waiting("retracted", 150, 4000, output=3),
    ]
    order_of("adaptive").sort(queue, set())
    assert [request.rid for request in queue] == ["retracted", "cached", "short", "long"]


def test_requests_whose_prefix_another_one_computes_come_last() -> None:
    queue = [waiting("copy", 0, 10), waiting("long", 50, 4000)]
    order_of("adaptive").sort(queue, {"copy"})
    assert [request.rid for request in queue] == ["long", "copy"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fastserve", "must be adaptive, got 'fastserve'"),
        ("adaptive[first_share=0.2]", "first_share has no effect inside SGLang"),
        ("adaptiv", "recipe must be one of"),
    ],
)
def test_other_recipes_and_parameters_are_refused(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match="SKIPJOIN_SGLANG") as error:
        order_of(name)
    assert reason in str(error.value)


def test_the_plugin_does_nothing_unless_the_environment_names_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKIPJOIN_SGLANG", raising=False)
    register()
    monkeypatch.setenv("SKIPJOIN_SGLANG", "bros")
    with pytest.raises(SystemExit, match="must be adaptive, got 'bros'"):
        register()
