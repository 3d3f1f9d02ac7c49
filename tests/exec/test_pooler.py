"""Vectors do not depend on how their prompts were cut, preempted or batched."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from engines import BLOCK_SIZE, CONFIGS, VOCAB, engine, run
from test_invisible_preemption import FORCED, happened

from skipjoin.core.events import Event, Preemption, Token
from skipjoin.core.prefixes import ContentPrefix
from skipjoin.core.request import Request, RequestOptions, ServiceClass
from skipjoin.exec.sampling import Sampling
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.config import ModelConfig, PoolingSettings
from skipjoin.model.loader import random_model
from skipjoin.policies.eviction import Recompute
from skipjoin.pooling import Pooling, Task
from skipjoin.sampling import TokenDetail, pooled

# How each case pools, and what must have happened.
CASES: dict[str, tuple[tuple[str, ...], set[object]]] = {
    "prompts in chunks of 3": (("mean", "last"), set()),
    "spilled at every step of a prompt": (("mean",), {Preemption.SPILL, "moved out in mid-prompt"}),
    "parts moved concurrently, late copies fail": (("mean", "last"), {Preemption.DROP, "moved out in mid-prompt"}),
    "overlapped, spilled, copies fail": (("mean",), {Preemption.DROP, "a tail was dropped"}),
}


@cache
def model(how: str) -> CausalLM:
    config = ModelConfig.from_dict(CONFIGS["qwen3" if how == "mean" else "mistral"])
    return random_model(replace(config, pooling=PoolingSettings(task=Task.EMBED, how=how, normalize=True)), seed=3)


def requests(how: str) -> list[Request]:
    draw = random.Random(5)
    found = []
    for number in range(8):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 25))]
        params = pooled(Pooling(dimensions=7 if number % 3 == 2 else None))
        found.append(
            Request(
                number,
                0.0,
                prompt,
                1,
                sampling=Sampling(params, 0, ()),
                prefix=ContentPrefix(BLOCK_SIZE) if how == "last" and number < 4 else None,
                options=RequestOptions(service=tuple(ServiceClass)[number % 2]),
            )
        )
    return found


def vectors_of(events: Sequence[Event]) -> dict[int, bytes]:
    tokens = [event for event in events if isinstance(event, Token)]
    return {event.request.id: event.detail.vector for event in tokens if isinstance(event.detail, TokenDetail)}


@cache
def vectors_alone(how: str) -> dict[int, bytes]:
    found = {}
    for request in requests(how):
        found |= vectors_of(run(*engine(model(how), Recompute(), device_blocks=40), [request]))
    return found


@pytest.mark.parametrize(("case", "how"), [(case, how) for case, (hows, _) in CASES.items() for how in hows])
def test_preemption_changes_no_bit_of_a_vector(case: str, how: str) -> None:
    options = dict(FORCED[case])
    fails = options.pop("fails", lambda: lambda move: False)
    core, executor = engine(model(how), options.pop("eviction")(), fails=fails(), **options)
    events = run(core, executor, requests(how))
    assert vectors_of(events) == vectors_alone(how)
    assert {what for what, count in happened(events).items() if count} >= CASES[case][1]
