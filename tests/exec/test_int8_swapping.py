from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import pytest
import torch
from copiers import LateCopier
from engines import BLOCK_SIZE, CONFIGS, Restless, SwapAll, make_core, make_store, run, tiny_model
from rank_links import LAYERS, thread_executor
from test_invisible_preemption import Fails

from skipjoin.builtin import builtin_model_path
from skipjoin.core.events import Event, Moved, Token
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.policy import Ordering
from skipjoin.core.request import Request
from skipjoin.core.step import Direction, Move
from skipjoin.exec.copy_engine import QuantizedCopies
from skipjoin.exec.local import LocalExecutor
from skipjoin.exec.rank_spec import rank_spec_of
from skipjoin.exec.ranks.sharded import ShardedExecutor
from skipjoin.exec.sampling import Sampling
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model, random_model
from skipjoin.model.ops.build import load_library
from skipjoin.sampling import SamplingParams, TokenDetail
from support.policies import SpillAll
from support.worlds import checkered, exhaustive, halved

# The output of each request: tokens with their log-probabilities.
Scores = dict[int, list[tuple[int, float]]]
MAX_ERROR = 0.1


@cache
def tally() -> CausalLM:
    return load_model(builtin_model_path(), LoadSpec(dtype="float32", device="cpu"))


def requests(vocab: int, count: int = 8, tokens: int = 24) -> list[Request]:
    """Return greedy requests whose prompts end within a block."""
    draw = random.Random(5)
    params = SamplingParams(temperature=0, max_tokens=tokens, logprobs=1)
    return [
        Request(
            number,
            0.0,
            [3 + draw.randrange(vocab - 3) for _ in range(draw.choice([5, 6, 11, 15]))],
            tokens,
            sampling=Sampling(params, number, ()),
        )
        for number in range(count)
    ]


class RestlessHalf(Restless):
    """Like `Restless`, but move only every other request."""

    def ahead(
        self, idle: Sequence[Request], ordering: Ordering, kv: KVLedger, now: float
    ) -> tuple[Sequence[Request], Sequence[Request]]:
        return super().ahead([request for request in idle if request.id % 2], ordering, kv, now)


def served(
    model: CausalLM,
    eviction: Callable[[], SwapAll],
    swap_dtype: str,
    *,
    late: int | None = None,
    fails: Sequence[Direction] = (),
    **options: int,
) -> tuple[Scores, set[int]]:
    """Run the requests and return their scores and the ids of those swapped in."""
    pools = options["device_blocks"], options.get("cpu_blocks", 0)
    store = make_store(model, *pools, fails=Fails(*fails), swap_dtype=swap_dtype)
    executor = LocalExecutor(model, store, copier=None if late is None else LateCopier(store, late))
    return scores(run(make_core(eviction(), **options), executor, requests(model.config.vocab_size)))


def scores(events: Iterable[Event]) -> tuple[Scores, set[int]]:
    found: Scores = {}
    swapped = set()
    for event in events:
        if isinstance(event, Token):
            detail = event.detail
            assert isinstance(detail, TokenDetail)
            assert detail.chosen.logprob is not None
            found.setdefault(event.request.id, []).append((event.token, detail.chosen.logprob))
        elif isinstance(event, Moved) and event.move.direction is Direction.IN:
            swapped.add(event.move.request.id)
    return found, swapped


def errors(ours: list[tuple[int, float]], theirs: list[tuple[int, float]]) -> list[float]:
    """Return differences of log-probabilities up to and including the first mismatch of tokens."""
    found = []
    for (token, one), (other_token, other) in zip(ours, theirs, strict=True):
        found.append(abs(one - other))
        if token != other_token:
            break
    return found


FORCED = {
    "overlapped": dict(eviction=lambda: RestlessHalf(5), device_blocks=90, cpu_blocks=90, slots=3, chunk=9),
    "overlapped, completing late": dict(
        eviction=lambda: RestlessHalf(5), device_blocks=90, cpu_blocks=90, slots=3, chunk=9, late=4
    ),
    "blocking": dict(eviction=SwapAll, device_blocks=14, cpu_blocks=90, slots=2),
    "blocking, in parts": dict(eviction=SpillAll, device_blocks=14, cpu_blocks=90, slots=2),
    "blocking, copies fail": dict(eviction=SwapAll, device_blocks=14, cpu_blocks=90, slots=2, fails=tuple(Direction)),
}


@pytest.mark.parametrize("case", halved(FORCED))
def test_int8_changes_only_swapped_requests_and_only_slightly(case: str) -> None:
    options = FORCED[case]
    alone, _ = served(tally(), SwapAll, "auto", device_blocks=90, slots=8)
    found, swapped = served(tally(), swap_dtype="int8", **options)  # type: ignore[arg-type]
    assert len(swapped) >= 4
    assert len(swapped) < 8 or case.startswith("blocking")
    for number, theirs in alone.items():
        error = max(errors(found[number], theirs))
        # A batch of another size rounds differently.
        assert error < (MAX_ERROR if number in swapped else 1e-4), number
    # Require differences, so that the lossless pool was not used by mistake.
    assert max(max(errors(found[number], alone[number])) for number in swapped) > 1e-4
    same = sum(len(errors(found[number], alone[number])) == 24 for number in alone)
    assert same >= 6


@pytest.mark.skipif(load_library() is None, reason="no compiler")
@pytest.mark.parametrize("case", ["overlapped", exhaustive("blocking, in parts"), "blocking, copies fail"])
def test_int8_kv_of_both_tiers_moves_without_any_change(case: str) -> None:
    model = load_model(builtin_model_path(), LoadSpec(dtype="float32", device="cpu", kv_cache_dtype="int8"))
    alone, _ = served(model, SwapAll, "auto", device_blocks=90, slots=8)
    found, swapped = served(model, swap_dtype="auto", **FORCED[case])  # type: ignore[arg-type]
    assert len(swapped) >= 4
    assert found == alone  # every bit of the log-probabilities
    exact, _ = served(tally(), SwapAll, "auto", device_blocks=90, slots=8)
    assert 0 < max(max(errors(found[number], exact[number])) for number in exact) < MAX_ERROR


POOLS = dict(device_blocks=20, cpu_blocks=60)


def check_ranks(
    executor: ShardedExecutor, stages: int, *, swap_dtype: str = "auto", kv_cache_dtype: str = "auto"
) -> None:
    """Assert that ranks, which quantize their own shares, produce what one rank does under the same plans.

    Their pools are `POOLS` of the small llama.
    """
    model = random_model(CONFIGS["llama"] | {"num_hidden_layers": LAYERS}, seed=3, kv_cache_dtype=kv_cache_dtype)
    found = []
    for each in (LocalExecutor(model, make_store(model, **POOLS, swap_dtype=swap_dtype)), executor):
        core = make_core(SwapAll(), **POOLS, slots=2, depth=stages)
        found.append(scores(run(core, each, requests(model.config.vocab_size, 5))))
    (one, swapped), (many, back_there) = found
    assert len(swapped) >= 3
    assert swapped == back_there
    # Sums are in another order across ranks, so that single codes may differ.
    assert all(max(errors(many[number], one[number])) < MAX_ERROR for number in one)


@pytest.mark.parametrize(
    ("layout", "int8"), checkered([(2, 1), (1, 2), (2, 2)], ["swap_dtype", "kv_cache_dtype"]), ids=str
)
def test_every_rank_quantizes_its_own_share(layout: tuple[int, int], int8: str) -> None:
    tp, pp = layout
    types = {int8: "int8"}
    check_ranks(thread_executor(tp, pp, "llama", **POOLS, **types), pp, **types)


@pytest.mark.parametrize("block_size", [16, 32])
def test_int8_blocks_take_less_than_two_thirds_of_bfloat16(block_size: int) -> None:
    spec = rank_spec_of(tiny_model("llama"), block_size, 1, "int8")
    assert 0.56 <= spec.cpu_block_bytes / (spec.block_bytes / 2) <= 0.63


class Broken:
    def quantize(self, *arguments: object) -> None:
        raise RuntimeError("no such instruction")

    dequantize = quantize


def test_failed_quantization_kernel_falls_back_to_torch(caplog: pytest.LogCaptureFixture) -> None:
    store = make_store(tiny_model("llama"), 8, 8, swap_dtype="int8")
    assert isinstance(store._engine, QuantizedCopies)
    store._engine._kernels._kernel = Broken
    numbers = torch.randn(store.device.block_view()[:2].shape)
    store.device.block_view()[:2] = numbers
    owner = requests(97, 1)[0]
    for direction in Direction:
        store.copy(Move(direction, owner, (0, 1), (0, 1), 2 * BLOCK_SIZE))
    assert [record.message for record in caplog.records] == [
        "a kernel that copies KV fails, so torch quantizes it, which is slower: no such instruction"
    ]
    torch.testing.assert_close(store.device.block_view()[:2], numbers, rtol=0, atol=0.02)
    with pytest.raises(ValueError, match="9 tokens do not end in the last of 2 blocks"):
        store.copy(Move(Direction.OUT, owner, (0, 1), (0, 1), 2 * BLOCK_SIZE + 1))
