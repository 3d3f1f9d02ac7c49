"""Small engines over the local executor, with policies that preempt as often as possible."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from copiers import HarshStore, Keeps, LateCopier, keeps_nothing, spoil

from skipjoin.core.decide.scheduler import Scheduler
from skipjoin.core.engine import EngineCore
from skipjoin.core.events import Event
from skipjoin.core.kv.ledger import KVLedger
from skipjoin.core.policy import Batcher, Callbacks, EvictionPolicy, Ordering
from skipjoin.core.policy_set import Policies
from skipjoin.core.prefixes import ContentPrefix
from skipjoin.core.request import Request, RequestOptions, ServiceClass
from skipjoin.core.step import Direction, Move, Slice, StateSizes, StepPlan
from skipjoin.exec.base import Executor
from skipjoin.exec.local import LocalExecutor
from skipjoin.exec.sampling import Sampling
from skipjoin.model import backends, loader
from skipjoin.model.causal_lm import CausalLM
from skipjoin.model.grammars import Grammars
from skipjoin.model.loader import random_model
from skipjoin.policies.admission import OnDemand
from skipjoin.policies.batching import Greedy
from skipjoin.policies.cost import LinearCost
from skipjoin.policies.stages import EvenStages
from skipjoin.sampling import SamplingParams
from skipjoin.structured_output import StructuredOutput
from support.load import changed
from support.policies import SpillAll, SwapAll

VOCAB = 97
_COMMON = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_GATED = _COMMON | {"intermediate_size": 80, "num_key_value_heads": 2, "max_position_embeddings": 256}
CONFIGS = {
    "llama": _GATED | {"architectures": ["LlamaForCausalLM"]},
    "mistral": _GATED | {"architectures": ["MistralForCausalLM"], "sliding_window": 11},
    "qwen2": _GATED | {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": _GATED | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
    "qwen3_moe": _GATED
    | {"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 40, "norm_topk_prob": True},
    "gemma3": _GATED
    | {"architectures": ["Gemma3ForCausalLM"], "head_dim": 16, "sliding_window": 11, "sliding_window_pattern": 2}
    | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 20.0},
    "olmo3": _GATED | {"architectures": ["Olmo3ForCausalLM"], "sliding_window": 11},
    "gpt_neox": _COMMON
    | {"architectures": ["GPTNeoXForCausalLM"], "intermediate_size": 80, "max_position_embeddings": 256},
    "opt": _COMMON | {"architectures": ["OPTForCausalLM"], "ffn_dim": 80, "max_position_embeddings": 256},
}
# Those that run on one rank only.
ALONE = {
    "gemma4": _GATED
    | {"architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 4, "head_dim": 12, "global_head_dim": 24}
    | {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 1}
    | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB, "attention_k_eq_v": True},
    "deepseek_v3": _GATED
    | {"architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8}
    | {"qk_nope_head_dim": 12, "v_head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4}
    | {"topk_group": 2, "moe_intermediate_size": 40, "first_k_dense_replace": 1},
}
BLOCK_SIZE = 4
# Fewer slots than requests, on both tiers.
STATES = StateSizes("state", 4, 3, 3, 1.0)


class Characters:
    """Tokenizer of the models above: the printable ASCII characters, and two special tokens at the end."""

    special_ids = frozenset({VOCAB - 2, VOCAB - 1})

    def token_bytes(self, token: int) -> bytes:
        return b"<special%d>" % token if token in self.special_ids else bytes([0x20 + token])

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [byte - 0x20 for byte in text.encode()]


GRAMMARS = Grammars(Characters, VOCAB, [VOCAB - 1])  # type: ignore[arg-type]


@cache
def tiny_model(
    family: str, attention: str = "auto", quantization: str = "none", kv_cache_dtype: str = "auto"
) -> CausalLM:
    """Return a model of the family with random float32 weights, large enough for distinct logits.

    Tests share it, so do not call this while the loader is patched.
    """
    assert loader.implementations is backends.implementations
    return random_model(
        (CONFIGS | ALONE)[family], seed=3, attention=attention, quantization=quantization, kv_cache_dtype=kv_cache_dtype
    )


class Rotating(Callbacks):
    """Rank the least recently scheduled request first, so that a full batch changes at every step."""

    def __init__(self, *, has_classes: bool = False) -> None:
        self._has_classes = has_classes
        self._last: dict[Request, int] = {}
        self._steps = 0

    def on_arrived(self, request: Request, now: float) -> None:
        self._last[request] = 0

    def on_scheduled(self, slices: Sequence[Slice], now: float) -> None:
        self._steps += 1
        for piece in slices:
            self._last[piece.request] = self._steps

    def on_finished(self, request: Request, now: float) -> None:
        del self._last[request]

    def ranked(self, now: float) -> Iterator[Request]:
        return iter(sorted(self._last, key=self.rank))

    def rank(self, request: Request) -> tuple[bool, int, int]:
        return (self._has_classes and request.is_best_effort, self._last[request], request.id)

    def outranks(self, one: Request, other: Request) -> bool:
        return self.rank(one)[:2] < self.rank(other)[:2]

    def expected_order(self, requests: Iterable[Request], now: float) -> list[tuple[Any, Request]]:
        return [(self.rank(request)[:2], request) for request in sorted(requests, key=self.rank)]


class Restless(SwapAll):
    """Also swap random idle requests out and in while steps run."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def ahead(
        self, idle: Sequence[Request], ordering: Ordering, kv: KVLedger, now: float
    ) -> tuple[Sequence[Request], Sequence[Request]]:
        some = [request for request in idle if self._random.random() < 0.5]
        return some, [request for request in some if not kv.tiers.can_move_out(request)]


class RestlessParts(SpillAll, Restless):
    """Like `Restless`, but also move requests that are partly on the CPU tier."""


def make_store(
    model: CausalLM,
    device_blocks: int,
    cpu_blocks: int = 0,
    *,
    delay_s: float = 0.0,
    fails: Callable[[Move], bool] = lambda move: False,
    keeps: Keeps = keeps_nothing,
    swap_dtype: str = "auto",
    states: StateSizes | None = None,
) -> HarshStore:
    """Return a store whose pools reveal slots that are read before they are written.

    See `HarshStore` for `delay_s`, `fails` and `keeps`.

    Args:
        swap_dtype: Type of KV on the CPU tier.
        states: Slots of a model whose layers have states.
    """
    store = HarshStore(
        model.config,
        model.dtype,
        torch.device("cpu"),
        device_blocks=device_blocks,
        cpu_blocks=cpu_blocks,
        block_size=BLOCK_SIZE,
        shard=model.shard,
        of=model.kv_format,
        swap_dtype=swap_dtype,
        states=states,
    )
    store.delay_s, store.fails, store.keeps = delay_s, fails, keeps
    for pool in filter(None, (store.device, store.cpu)):
        spoil(pool.tensor, slice(None))
    for rows in filter(None, (store.device.states, store._cpu_states)):
        spoil(rows.tensor, slice(None))
    return store


def make_core(
    eviction: EvictionPolicy,
    *,
    device_blocks: int,
    cpu_blocks: int = 0,
    slots: int = 2,
    chunk: int | None = None,
    depth: int = 1,
    overlap: bool = False,
    stages: int = 1,
    states: StateSizes | None = None,
) -> EngineCore:
    """Return an engine core that rotates its requests through `slots` slots."""
    tokens = chunk or 10_000
    batcher: Batcher = Greedy(slots, tokens, chunked=chunk is not None)
    if stages > 1:
        cost, cuts = LinearCost(floor=2.0, prefill_token=1.0, decode=0.5), chunk is not None
        batcher = EvenStages(batcher, cost, stages, max_seqs=slots * stages, max_tokens=tokens * stages, cuts=cuts)
    policies = Policies(Rotating(has_classes=eviction.shares), batcher, OnDemand(), eviction)
    ledger = KVLedger(device_blocks, cpu_blocks, BLOCK_SIZE, states=states)
    return EngineCore(Scheduler(policies, ledger, depth=depth, overlap=overlap))


def engine(
    model: CausalLM,
    eviction: EvictionPolicy,
    *,
    device_blocks: int,
    cpu_blocks: int = 0,
    slots: int = 2,
    chunk: int | None = None,
    depth: int = 1,
    late: int | None = None,
    delay_s: float = 0.0,
    fails: Callable[[Move], bool] = lambda move: False,
    swap_dtype: str = "auto",
    states: StateSizes = STATES,
) -> tuple[EngineCore, LocalExecutor]:
    """Return a core and its executor; see `make_core` and `make_store`.

    Args:
        late: Number of plans that an overlapped move takes, including the one that starts it; None copies on a thread.
    """
    sizes = states if model.config.states is not None else None
    core = make_core(
        eviction,
        device_blocks=device_blocks,
        cpu_blocks=cpu_blocks,
        slots=slots,
        chunk=chunk,
        depth=depth,
        overlap=depth > 1,
        states=sizes,
    )
    store = make_store(
        model,
        device_blocks,
        cpu_blocks,
        delay_s=delay_s,
        fails=fails,
        keeps=findable(core),
        swap_dtype=swap_dtype,
        states=sizes,
    )
    copier = None if late is None else LateCopier(store, late)
    return core, LocalExecutor(model, store, copier=copier, grammars=GRAMMARS)


def findable(core: EngineCore) -> Keeps:
    """Return a predicate for blocks that other requests may read.

    These are blocks that the prefix cache can find on either tier and bidirectional blocks, as of the plans in flight.
    """
    recent: deque[tuple[set[int], set[int], set[int]]] = deque(maxlen=core.scheduler.depth + 1)
    start_step = core.start_step

    def start_and_note(now: float) -> StepPlan | None:
        shared = set(core.kv._shared.of)
        if (plan := start_step(now)) is not None:
            kv = core.kv
            recent.append((set(kv.device._keys), set(kv.cpu._keys), shared.union(kv._shared.of)))
        return plan

    core.start_step = start_and_note  # type: ignore[method-assign]

    def keeps(block: int, is_part: bool, on_cpu: bool) -> bool:
        if on_cpu:
            return any(block in keyed for _, keyed, _ in tuple(recent))
        return any(block in keyed or (block in shared and not is_part) for keyed, _, shared in tuple(recent))

    return keeps


class Closable(Executor, Protocol):
    def close(self) -> None: ...


def run(core: EngineCore, executor: Closable, requests: Sequence[Request], *, leads: bool = False) -> list[Event]:
    """Run all requests to completion, and check the ledger after every step.

    Bidirectional policies get one real-time request at a time.

    Args:
        leads: Whether the other requests arrive when the first one has its first token.
    """
    shares, late = core.scheduler.policies.eviction.shares, list(requests)

    def is_due(request: Request) -> bool:
        if leads and request is not requests[0] and not requests[0].progress.output:
            return False
        return not shares or request.is_best_effort or request is requests[0] or steps >= _APART * request.id

    core.on_finished = executor.on_finished
    handles: deque = deque()
    events: list[Event] = []
    steps = 0
    while late or core.requests or handles:
        for request in filter(is_due, late):
            core.add(request, 0.0)
        late = [request for request in late if not is_due(request)]
        while (plan := core.start_step(float(steps))) is not None:
            handles.append(executor.submit(plan, float(steps)))
        if handles:  # no handle means that all present requests have finished
            core.finish_step(handles.popleft().result(), float(steps))
        core.kv.check()
        events += core.take_events()
        steps += 1
        assert steps < 5000, "the requests do not finish"
    executor.close()
    assert core.kv.device_free == core.kv.device_total
    # The prefix cache may still have copies in flight.
    assert core.kv.tiers.cpu_free + core.kv.tiers.blocks_in_transit[Direction.OUT] == core.kv.tiers.cpu_total
    return events


def shortened(requests: list[Request], tokens: int) -> list[Request]:
    """Limit the outputs of new requests, for executors that interpret kernels."""
    return [changed(request, max_tokens=min(request.max_tokens, tokens)) for request in requests]


# Number of steps between real-time requests.
_APART = 4
# Two full blocks and one partial block.
COMMON = (7, 5, 3, 2, 11, 13, 17, 19, 23)


# Constraints under which outputs do not end within the requests' tokens.
_NUMBERS = StructuredOutput.json({"type": "array", "items": {"type": "integer"}, "minItems": 20})
_WORDS = StructuredOutput(kind="regex", text="[a-z]{2}([0-9]{1,3}[A-Z .]+){9}")
_RECORD = {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"], "additionalProperties": False}
_RECORDS = StructuredOutput.json(
    {"type": "array", "items": {"$ref": "#/$defs/record"}, "minItems": 20, "$defs": {"record": _RECORD}}
)


def mixed_requests(
    eos: int | None = None, common: Sequence[int] = (), *, adopts: bool = False, has_classes: bool = True
) -> list[Request]:
    """Return seven requests of mixed lengths and sampling parameters, three of them with a grammar.

    Args:
        common: Prefix of all prompts; the longest prompt does not grow by it.
        adopts: Whether requests may use KV of the prefix cache.
        has_classes: Whether every second request is best effort.
    """
    kinds = [
        {"temperature": 0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "structured_outputs": _NUMBERS},
        {"temperature": 0.8, "top_k": 20, "presence_penalty": 0.7},
        {"temperature": 0, "logit_bias": {5: 2.0}, "min_tokens": 8},
        {"temperature": 1.5, "min_p": 0.05, "structured_outputs": _WORDS},
        {"temperature": 0, "structured_outputs": _RECORDS},
    ]
    draw = random.Random(11)
    requests = []
    for number, kind in enumerate(kinds):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 14))]
        prompt = [*common, *prompt[: 14 - len(common)]]
        params = SamplingParams(max_tokens=draw.randint(8, 12), **kind)
        ends = frozenset() if eos is None else frozenset([eos])
        requests.append(
            Request(
                number,
                0.0,
                prompt,
                params.max_tokens or 1,
                min_tokens=params.min_tokens,
                stop_tokens=ends,
                sampling=Sampling(params, seed=100 + number, eos_token_ids=tuple(ends)),
                prefix=ContentPrefix(BLOCK_SIZE) if adopts else None,
                options=RequestOptions(service=tuple(ServiceClass)[number % 2 if has_classes else 0]),
            )
        )
    return requests
