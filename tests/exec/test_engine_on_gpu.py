from __future__ import annotations

import pytest
import torch
from engines import BLOCK_SIZE, CONFIGS, GRAMMARS, Restless, SwapAll, make_core, mixed_requests, run, tiny_model

from skipjoin.core.policy import EvictionPolicy
from skipjoin.core.request import Request
from skipjoin.exec.graphs import DecodeGraphs, graph_batch_sizes, record_graphs
from skipjoin.exec.local import LocalExecutor
from skipjoin.exec.rank_spec import make_store
from skipjoin.exec.sampling import Sampling
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.config import ModelConfig
from skipjoin.model.parallel import Group
from skipjoin.model.weights import RandomWeights
from skipjoin.policies.eviction import Recompute
from skipjoin.sampling import SamplingParams
from support.policies import SpillAll

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CARD = torch.device("cuda", 0)
EVICTIONS = {"swap": SwapAll, "spill": SpillAll, "recompute": Recompute, "restless": lambda: Restless(5)}


class CpuDrawnWeights(RandomWeights):
    """Random weights drawn on the CPU, because a GPU generates other numbers from the same seed."""

    def take(self, *args, **options) -> torch.Tensor:  # type: ignore[no-untyped-def]
        return super().take(*args, **options).to(CARD)


def model_on_gpu(family: str, back_end: str = "triton") -> CausalLM:
    from skipjoin.model.backends import implementations  # noqa: PLC0415

    ops, attention = implementations(back_end, torch.float32, CARD)
    weights = CpuDrawnWeights(3, torch.float32, torch.device("cpu"))
    config = ModelConfig.from_dict(CONFIGS[family])
    return CausalLM(config, weights, ops=ops, attention=attention, dtype=torch.float32, device=CARD, group=Group())


def outputs(
    model: CausalLM,
    requests: list[Request],
    eviction: EvictionPolicy,
    *,
    blocks: int,
    cpu_blocks: int,
    depth: int,
    graphs: bool,
    chunk: int | None = None,
) -> list[list[int]]:
    store = make_store(model, blocks, cpu_blocks, BLOCK_SIZE)
    store.device.tensor.fill_(torch.nan)
    if store.cpu is not None:
        store.cpu.tensor.fill_(torch.nan)
    recorded: DecodeGraphs | None = None
    if graphs:
        recorded = record_graphs(model, store.device, graph_batch_sizes(4), 64)
        assert recorded is not None
    executor = LocalExecutor(model, store, graphs=recorded, grammars=GRAMMARS)
    core = make_core(
        eviction,
        device_blocks=blocks,
        cpu_blocks=cpu_blocks,
        slots=4,
        chunk=chunk,
        depth=depth,
        overlap=True,
    )
    run(core, executor, requests)
    return [request.progress.output for request in requests]


def on_cpu(family: str, requests: list[Request]) -> list[list[int]]:
    model = tiny_model(family)
    executor = LocalExecutor(model, make_store(model, 200, 0, BLOCK_SIZE), grammars=GRAMMARS)
    core = make_core(Recompute(), device_blocks=200, slots=1)
    run(core, executor, requests)
    return [request.progress.output for request in requests]


@pytest.mark.parametrize("family", sorted(CONFIGS))
@pytest.mark.parametrize("graphs", [False, True])
def test_gpu_produces_the_tokens_of_the_cpu(family: str, graphs: bool) -> None:
    got = outputs(model_on_gpu(family), mixed_requests(), SwapAll(), blocks=200, cpu_blocks=0, depth=2, graphs=graphs)
    assert got == on_cpu(family, mixed_requests())


@pytest.mark.parametrize("eviction", sorted(EVICTIONS))
@pytest.mark.parametrize(("depth", "graphs", "chunk"), [(1, False, 8), (2, True, None), (2, True, 6)])
@pytest.mark.parametrize("family", ["llama", "mistral", "opt"])
def test_preemption_changes_no_tokens_on_gpu(
    family: str, depth: int, graphs: bool, chunk: int | None, eviction: str
) -> None:
    got = outputs(
        model_on_gpu(family),
        mixed_requests(),
        EVICTIONS[eviction](),
        blocks=16,
        cpu_blocks=60,
        depth=depth,
        graphs=graphs,
        chunk=chunk,
    )
    assert got == on_cpu(family, mixed_requests())


def test_torch_backend_produces_the_tokens_of_the_cpu() -> None:
    got = outputs(
        model_on_gpu("qwen3", "torch"), mixed_requests(), SwapAll(), blocks=16, cpu_blocks=60, depth=2, graphs=False
    )
    assert got == on_cpu("qwen3", mixed_requests())


def test_plans_are_queued_before_earlier_ones_complete() -> None:
    model = model_on_gpu("llama")
    store = make_store(model, 64, 0, BLOCK_SIZE)
    executor = LocalExecutor(model, store)
    core = make_core(Recompute(), device_blocks=64, slots=4, depth=2, overlap=True)
    core.add(Request(0, 0.0, [1, 2, 3], 30, sampling=Sampling(SamplingParams(temperature=0), 0, ())), 0.0)
    for _ in range(3):  # compile the kernels
        core.finish_step(executor.submit(core.start_step(0.0), 0.0).result(), 0.0)
    torch.cuda._sleep(500_000_000)  # about 0.25 s of GPU time ahead of the steps
    first, second = (executor.submit(core.start_step(0.0), 0.0) for _ in range(2))
    second._in_flight.result(timeout=0.2)
    assert not first.done()
    assert not second.done()
    for handle in (first, second):
        result = handle.result()
        assert result.tokens[0] is not None
        core.finish_step(result, 0.0)
    executor.close()


def test_out_of_memory_fails_one_request() -> None:
    model = model_on_gpu("llama")
    small = [Request(i, 0.0, [i + 1] * 6, 5, sampling=Sampling(SamplingParams(temperature=0), 0, ())) for i in range(2)]
    expected = on_cpu("llama", [Request(r.id, 0.0, r.prompt, 5, sampling=r.sampling) for r in small])
    large = Request(2, 0.0, [7] * 250, 3, sampling=Sampling(SamplingParams(temperature=0), 0, ()))
    forward = model.forward

    def greedy(batch, kv):  # type: ignore[no-untyped-def]
        if batch.num_tokens > 100:
            torch.empty(1 << 60, dtype=torch.uint8, device=CARD)
        return forward(batch, kv)

    model.forward = greedy  # type: ignore[method-assign]
    got = outputs(model, [*small, large], Recompute(), blocks=200, cpu_blocks=0, depth=2, graphs=False)
    assert got == [*expected, []]
