from __future__ import annotations

import gc
import tracemalloc

from skipjoin.config import EngineConfig
from skipjoin.core.request import Request
from skipjoin.engine.build import assemble
from skipjoin.engine.loop import EngineLoop
from skipjoin.sampling import SamplingParams, TokenDetail, TokenLogprob
from skipjoin.server.engines.engine_server import StepOutputsBuilder

SEQUENCES = 64 * 16
PARAMS = SamplingParams(max_tokens=900, ignore_eos=True, logprobs=20)


def stream_and_abort(loop: EngineLoop, first: int) -> int:
    """Run and abort sequences as for clients that do not read, and return the log-probabilities produced."""
    builder, scored = StepOutputsBuilder(), 0
    loop.on_plan = builder.begin
    for number in range(first, first + SEQUENCES):
        loop.add(number, list(range(40, 60)), PARAMS)
        builder.arrived(number)
    for _ in range(6):
        outputs = builder.fold(loop.step())
        scored += sum(len(chosen.top) for chosen, *_ in outputs.details.values()) if outputs else 0
        loop.submit()
    for number in range(first, first + SEQUENCES):
        loop.abort(number)
    while not loop.idle or loop.core.scheduler.events:
        builder.fold(loop.step())
    assert not builder._new
    gc.collect()
    return scored


def living() -> list[object]:
    return [thing for thing in gc.get_objects() if type(thing) in (Request, TokenDetail, TokenLogprob)]


def test_aborted_streams_free_their_memory() -> None:
    others = living()  # of other tests in this process
    config = EngineConfig(recipe="fcfs", profile="off", kv_cache_gib=0.05, swap_space_gib=0, threads=1)
    loop = EngineLoop(assemble(config))
    try:
        assert stream_and_abort(loop, 0) >= 20 * SEQUENCES
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        assert stream_and_abort(loop, SEQUENCES) >= 20 * SEQUENCES
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        known = set(map(id, others))
        kept = [type(thing) for thing in living() if id(thing) not in known]
        assert set(kept) <= {Request}
        assert len(kept) <= 2 * config.max_num_seqs  # the last batch, until the next one
        assert after - before < 1 << 20  # one KiB per request would be as much
    finally:
        loop.close()
