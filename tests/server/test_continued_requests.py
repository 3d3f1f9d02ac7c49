from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from skipjoin.config import EngineConfig
from skipjoin.core.events import Event, Finished, Token
from skipjoin.core.request import Request
from skipjoin.engine.build import assemble
from skipjoin.engine.loop import EngineLoop
from skipjoin.observe.metric_snapshot import Snapshot, merged
from skipjoin.observe.metrics import EngineMetrics
from skipjoin.sampling import BadWords, SamplingParams, ThinkingBudget, TokenDetail
from skipjoin.structured_output import StructuredOutput

PROMPT = list(range(40, 60))
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 3},
    {"temperature": 1.3, "seed": 11, "max_tokens": 12, "ignore_eos": True, "logprobs": 1},
    {"temperature": 0.8, "seed": -5, "max_tokens": 12, "min_tokens": 9, "presence_penalty": 1.5, "top_p": 0.9},
    {
        "temperature": 0,
        "max_tokens": 12,
        "ignore_eos": True,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.4,
        "logit_bias": {7: 3.0},
    },
    {
        "temperature": 1.2,
        "seed": 6,
        "max_tokens": 12,
        "allowed_token_ids": tuple(range(60, 70)),
        "bad_words": BadWords(((61,), *((token, 62) for token in range(60, 65)))),
        "thinking_budget": ThinkingBudget(tokens=7, opening=(1,), closing=99, is_open=True),
    },
    {"temperature": 1.0, "seed": 3, "max_tokens": 16, "structured_outputs": StructuredOutput.json({"type": "array"})},
    {
        "temperature": 0,
        "max_tokens": 16,
        "repetition_penalty": 1.2,
        "structured_outputs": StructuredOutput(kind="regex", text="([0-9]{1,3}, ){8}x", after=(78, 78)),
    },
]


class Outcome(NamedTuple):
    tokens: list[int]
    details: list[TokenDetail]
    reason: str


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineLoop]:
    loop = EngineLoop(assemble(EngineConfig(profile="off", kv_cache_gib=0.02, swap_space_gib=0, threads=1)))
    yield loop
    loop.close()


def run(loop: EngineLoop, params: SamplingParams, output: list[int], events: list[Event] | None = None) -> Outcome:
    loop.add(len(events or ()) + 1, PROMPT, params, output=output, age_s=1.5 if output else 0.0)
    tokens: list[int] = []
    details: list[TokenDetail] = []
    while True:
        for event in (new := loop.step()):
            if isinstance(event, Token):
                tokens.append(event.token)
                details.append(event.detail)  # type: ignore[arg-type]
            elif isinstance(event, Finished):
                reason = event.reason.value
        if events is not None:
            events.extend(new)
        if not loop.core.requests:
            return Outcome(tokens, details, reason)


@pytest.mark.parametrize("fields", PARAMS, ids=[str(number) for number in range(len(PARAMS))])
def test_resumed_request_generates_the_same_tokens(engine: EngineLoop, fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    whole = run(engine, params, [])
    assert len(whole.tokens) > 8
    for known in range(1, len(whole.tokens)):
        rest = run(engine, params, whole.tokens[:known])
        assert rest.tokens == whole.tokens[known:]
        assert rest.reason == whole.reason
        if params.logprobs is not None:
            for ours, theirs in zip(rest.details, whole.details[known:], strict=True):
                assert ours.chosen.token == theirs.chosen.token
                assert ours.chosen.logprob == pytest.approx(theirs.chosen.logprob, abs=1e-4)
                assert [token for token, _ in ours.chosen.top] == [token for token, _ in theirs.chosen.top]


def test_min_tokens_counts_tokens_of_the_previous_engine(engine: EngineLoop) -> None:
    greedy = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    tokens = run(engine, SamplingParams(**greedy), []).tokens
    params = SamplingParams(**greedy, min_tokens=6, stop_token_ids=(tokens[7],))
    whole = run(engine, params, [])
    assert whole.reason in ("stop", "length")
    for known in range(1, len(whole.tokens)):
        assert run(engine, params, whole.tokens[:known]) == (
            whole.tokens[known:],
            whole.details[known:],
            whole.reason,
        )


def test_metrics_count_a_resumed_request_once(engine: EngineLoop) -> None:
    """An engine dies after four of nine tokens, and another resumes the request."""

    def counted(parts: list[list[Event]]) -> Snapshot:
        snapshots = []
        for part in parts:
            metrics = EngineMetrics(device_blocks=10, block_size=16, block_bytes=1)
            metrics.observe(part)
            snapshots.append(metrics.snapshot())
        return merged(snapshots[-1:], gone=snapshots[0].at_rest() if len(parts) > 1 else None)

    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    alone: list[Event] = []
    tokens = run(engine, params, [], alone).tokens
    fourth = [index for index, event in enumerate(alone) if isinstance(event, Token)][3]
    after: list[Event] = []
    run(engine, params, tokens[:4], after)
    one, two = counted([alone]), counted([alone[: fourth + 1], after])
    for name in ("prompt_tokens_total", "generation_tokens_total", "request_success_total"):
        assert two.summed(name) == one.summed(name)
    for name in ("request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens"):
        assert two.summed(name) == one.summed(name)
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert sum(two.summed(name)[:-1]) == sum(one.summed(name)[:-1]) == 1
    assert two.summed("e2e_request_latency_seconds")[-1] >= 1.5  # since its first arrival
    for name in ("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"):
        assert sum(two.summed(name)) == 0  # no engine saw the whole interval
    assert sum(two.summed("inter_token_latency_seconds")[:-1]) == 7  # all gaps except the one between the engines


def test_completed_request_cannot_be_resumed() -> None:
    with pytest.raises(ValueError, match="generated already"):
        Request(1, 0.0, [1], 2, resumed=[5, 6])
