from __future__ import annotations

from functools import cache

import pytest
from engines import COMMON, engine, mixed_requests, run
from test_invisible_preemption import EXPECTED, FORCED, happened, outputs

from skipjoin.core.events import Preemption
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.loader import random_model
from skipjoin.model.ops.build import load_library
from skipjoin.policies.eviction import Recompute
from support.fallback_models import FALLBACKS, FURTHER
from support.worlds import exhaustive


@cache
def _model(name: str, kv_cache_dtype: str) -> CausalLM:
    return random_model((FALLBACKS | FURTHER)[name] | {"vocab_size": 97}, seed=3, kv_cache_dtype=kv_cache_dtype)


# Dropped, moved between the tiers, and filled from both ends.
@pytest.mark.skipif(load_library() is None, reason="no compiler")
@pytest.mark.parametrize(
    ("case", "name", "kv_cache_dtype"),
    [
        exhaustive("dropped at every step", "vaultgemma", "auto"),
        ("parts moved concurrently", "mimo", "auto"),
        ("shared at every step", "stablelm", "int8"),
        exhaustive("overlapped, swapped, chunks", "gpt2", "int8"),
        ("dropped at every step", "llama4", "auto"),
        ("overlapped, swapped, chunks", "falcon_rw", "auto"),
        ("shared at every step", "minimax", "auto"),
        ("dropped at every step", "recurrent_gemma", "auto"),
        ("parts moved concurrently", "rwkv", "auto"),
        *(
            exhaustive(case, name, "auto")
            for case in ("dropped at every step", "shared at every step", "parts moved concurrently")
            for name in FURTHER
        ),
    ],
)
def test_preemption_changes_no_tokens_through_transformers(case: str, name: str, kv_cache_dtype: str) -> None:
    model, alone = _model(name, kv_cache_dtype), []
    for request in mixed_requests(common=COMMON):
        run(*engine(model, Recompute(), device_blocks=60), [request])
        alone.append(request.progress.output)
    requests = mixed_requests(common=COMMON, adopts=True)
    options = dict(FORCED[case])
    found = happened(run(*engine(model, options.pop("eviction")(), **options), requests, leads=True))
    assert outputs(requests) == alone
    assert found["adopted"]
    # A state moves as a whole.
    never = {"restored slots"} | ({Preemption.SPILL} if model.config.states is not None else set())
    assert all(found[what] for what in EXPECTED[case] - never), found
