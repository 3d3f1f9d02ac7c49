"""A model runner without a model, for vLLM's schedulers: it keeps what every KV slot holds and fails on a wrong read.

Import it only where vLLM is installed.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from skipjoin.vllm.scheduler import Scheduler

BLOCK_SIZE = 32
BLOCK_BYTES = BLOCK_SIZE * 2 * 4  # one head of one float for key and value
MAX_LEN = 512
# Steps beyond any world's need.
PATIENCE = 30_000

init_none_hash(sha256)


@dataclass(frozen=True)
class Setup:
    recipe: str = "fastserve"
    is_async: bool = False
    runner: int = 1
    caching: bool = False
    chunked: bool = True
    policy: str = "fcfs"
    loras: int = 0
    cpu_blocks: int = 0
    link_gb_s: float = 1.0
    window: int = 0  # of a second group of layers
    drafts: int = 0  # tokens that are drafted in each step
    encoder_cache: int = 0  # embeddings that are kept, and computed in a step; without it, requests have no images
    params: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        how = "async" if self.is_async else "sync"
        tier = f"-tier{self.cpu_blocks}" if self.cpu_blocks else ""
        return f"{self.recipe}-{how}-V{self.runner}{'-caching' if self.caching else ''}{tier}"


def write_model(folder: Path) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": MAX_LEN,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tier_config(**extra: float) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="CpuTier",
        kv_connector_module_path="skipjoin.vllm",
        kv_role="kv_both",
        kv_connector_extra_config=extra,
    )


def engine_config(model: Path, setup: Setup, *, seqs: int, tokens: int, blocks: int) -> Any:
    chosen = {"recipe": setup.recipe, "forecaster": "none", "params": dict(setup.params)}
    more: dict[str, Any] = {"enable_lora": True, "max_loras": setup.loras} if setup.loras else {}
    if setup.cpu_blocks:
        more["kv_transfer_config"] = tier_config(cpu_gb=setup.cpu_blocks * BLOCK_BYTES / 1e9, link_gb_s=setup.link_gb_s)
        more["scheduler_cls"] = "skipjoin.vllm.Scheduler"  # checked where the plugin is installed
    if setup.drafts:
        more["speculative_config"] = {"method": "ngram", "num_speculative_tokens": setup.drafts, "prompt_lookup_max": 2}
    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=MAX_LEN,
        max_num_seqs=seqs,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=setup.caching,
        enable_chunked_prefill=setup.chunked,
        max_num_batched_tokens=max(tokens, 1 if setup.chunked else MAX_LEN),
        scheduling_policy=setup.policy,
        additional_config={"skipjoin": chosen},
        **more,
    ).create_engine_config()
    config.scheduler_config.async_scheduling = setup.is_async
    config.cache_config.num_gpu_blocks = blocks
    return config


def make_scheduler(config: Any, *, cls: type = Scheduler, runner: int = 1, window: int = 0) -> Any:
    shape: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    groups = [KVCacheGroupSpec(["layer"], FullAttentionSpec(**shape))]
    if window:
        groups.append(KVCacheGroupSpec(["other"], SlidingWindowSpec(**shape, sliding_window=window)))
    kv = KVCacheConfig(num_blocks=config.cache_config.num_gpu_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    grammars = StructuredOutputManager(config)
    made = cls(config, kv, grammars, block_size=BLOCK_SIZE, hash_block_size=BLOCK_SIZE, log_stats=True)
    made.use_v2_model_runner = runner == 2
    return made


def make_request(name: str, prompt: list[int], max_tokens: int, *, caching: bool = False, **more: Any) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=more.pop("extra_args", None))
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256) if caching else None
    return Request(name, prompt, params, None, block_hasher=hasher, **more)


def next_token(tokens: list[int]) -> int:
    return hash((len(tokens), tuple(tokens[-3:]))) % 400 + 20


def images(draw: random.Random, prompt: list[int], longest: int) -> list[MultiModalFeatureSpec]:
    """Put up to three of six images into a prompt. Their tokens tell which image it is."""
    found, at = [], draw.randrange(10)
    for _ in range(draw.randrange(4)):
        number = draw.randrange(6)
        length = longest - 3 * number
        prompt[at : at + length] = [500 + number] * length
        found.append(MultiModalFeatureSpec(None, "image", f"image{number}", PlaceholderRange(at, length)))
        at += length + draw.randrange(20)
        prompt += [20] * (at - len(prompt))
    return found


@dataclass
class State:
    blocks: list[list[int]]  # of each group
    tokens: list[int]
    computed: int
    images: Sequence[MultiModalFeatureSpec] = ()


@dataclass
class ShadowRunner:
    """Follows `SchedulerOutput` as model runner V1 or V2 does.

    Attributes:
        windows: Number of tokens that each group's layers read.
        slots: Position and token whose KV each slot of each block holds.
        saved: The same of the CPU tier.
        encoded: Images whose encoder outputs are kept.
        copied: Number of blocks copied so far.
        overlapped: Number of those that may be copied during a step.
    """

    seqs: int
    runner: int
    windows: tuple[int, ...] = (MAX_LEN,)
    slots: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    saved: dict[tuple[int, int], tuple[int, int] | None] = field(default_factory=dict)
    late: Any = None  # overlapped copies, which end as late as they may
    encoded: set[str] = field(default_factory=set)
    encodings: int = 0
    copied: int = 0
    overlapped: int = 0
    states: dict[str, State] = field(default_factory=dict)

    def run(self, output: Any) -> ModelRunnerOutput:
        """Compute and sample. Raise AssertionError for a read of a slot that holds something else."""
        self._update(output)
        if (copies := getattr(output, "kv_connector_metadata", None)) is not None:
            self._copy(self.late)
            self._copy(copies.blocking)
            self.late = copies.overlapped
            self.overlapped += len(self.late.saves) + len(self.late.loads)
        self._encode(output)
        scheduled = output.num_scheduled_tokens
        assert len(scheduled) <= self.seqs
        drafts = output.scheduled_spec_decode_tokens
        sampled = [self._compute(name, tokens, drafts.get(name, ())) for name, tokens in scheduled.items()]
        return ModelRunnerOutput(
            req_ids=list(scheduled),
            req_id_to_index={name: index for index, name in enumerate(scheduled)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def _update(self, output: Any) -> None:
        is_second = self.runner == 2
        for name in {*output.finished_req_ids, *((output.preempted_req_ids or ()) if is_second else ())}:
            self.states.pop(name, None)
        for new in output.scheduled_new_reqs:
            assert not is_second or new.req_id not in self.states, "a new request has a slot"
            tokens = new.prefill_token_ids if is_second else new.prompt_token_ids
            blocks = [*map(list, new.block_ids)]
            self.states[new.req_id] = State(blocks, list(tokens), new.num_computed_tokens, new.mm_features)
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            state, blocks = self.states[name], cached.new_block_ids[index]
            if name in cached.resumed_req_ids:
                assert not is_second
                state.blocks, state.tokens = [*map(list, blocks)], list(cached.all_token_ids[name])
            elif blocks:
                for table, more in zip(state.blocks, blocks, strict=True):
                    table.extend(more)
            state.computed = cached.num_computed_tokens[index]
        assert not is_second or len(self.states) <= self.seqs, "more requests than slots"

    def _encode(self, output: Any) -> None:
        self.encoded.difference_update(output.free_encoder_mm_hashes)
        for name, numbers in output.scheduled_encoder_inputs.items():
            self.encoded.update(self.states[name].images[number].identifier for number in numbers)
            self.encodings += len(numbers)

    def _copy(self, copies: Any) -> None:
        if copies is None:
            return
        for at in range(BLOCK_SIZE):
            for device, cpu in copies.saves:
                self.saved[cpu, at] = self.slots.get((device, at))
            for cpu, device in copies.loads:
                if (found := self.saved.get((cpu, at))) is not None:
                    self.slots[device, at] = found
                else:
                    self.slots.pop((device, at), None)
        self.copied += len(copies.saves) + len(copies.loads)

    def _compute(self, name: str, count: int, drafts: Sequence[int]) -> list[int]:
        state = self.states[name]
        start, end = state.computed, state.computed + count
        inputs = [*state.tokens, *drafts]
        assert end <= len(inputs), f"{name} runs tokens that are unknown"
        for image in state.images:
            if image.mm_position.offset < end and start < image.mm_position.offset + image.mm_position.length:
                assert image.identifier in self.encoded, f"{name} lacks an encoder output at {start}"
        for blocks, window in zip(state.blocks, self.windows, strict=True):
            assert end <= len(blocks) * BLOCK_SIZE, f"{name} lacks blocks"
            for at in range(max(0, start + 1 - window), end):
                slot = blocks[at // BLOCK_SIZE], at % BLOCK_SIZE
                if at >= start:
                    self.slots[slot] = at, inputs[at]
                assert self.slots.get(slot) == (at, inputs[at]), f"{name} reads wrong KV at {at}"
        if end < len(state.tokens):
            return []
        known = len(state.tokens)
        for draft in (*drafts, None):
            token = next_token(state.tokens)
            state.tokens.append(token)
            if token != draft:
                break
        return state.tokens[known:]

    def draft(self, names: Iterable[str], count: int, draw: random.Random) -> DraftTokenIds:
        """Draft tokens of which a random number is right."""
        found = DraftTokenIds([], [])
        for name in names:
            if (state := self.states.get(name)) is None:
                continue
            right, tokens = draw.randrange(count + 1), list(state.tokens)
            for number in range(draw.randrange(count + 1)):
                tokens.append(next_token(tokens) if number < right else 7)
            found.req_ids.append(name)
            found.draft_token_ids.append(tokens[len(state.tokens) :])
        return found


@dataclass
class ShadowWorld:
    """Random requests, aborts, pauses, sleeps and resets on one scheduler."""

    model: Path
    setup: Setup
    seed: int
    cls: type = Scheduler
    ends: list[str] = field(default_factory=list)
    steps: int = 0

    def __post_init__(self) -> None:
        self.draw = draw = random.Random(self.seed)
        self.seqs = draw.choice([2, 4, 8])
        blocks, tokens = draw.choice([18, 24, 40]), draw.choice([64, 128, 512])
        blocks *= 2 if self.setup.window else 1
        config = engine_config(self.model, self.setup, seqs=self.seqs, tokens=tokens, blocks=blocks)
        window = self.setup.window
        self.scheduler = make_scheduler(config, cls=self.cls, runner=self.setup.runner, window=window)
        if size := self.setup.encoder_cache:
            self.scheduler.encoder_cache_manager = EncoderCacheManager(size)
            self.scheduler.max_num_encoder_input_tokens = size
        if self.setup.cpu_blocks:  # which moves are overlapped depends on the time of steps
            self.scheduler.clock = partial(next, itertools.count(0.0, 1e-4))
        self.shadow = ShadowRunner(self.seqs, self.setup.runner, (MAX_LEN, window) if window else (MAX_LEN,))
        self.live: list[Request] = []
        self.got: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.flights: list[tuple[Any, Any]] = []

    def jobs(self, count: int = 30) -> list[tuple[int, Request]]:
        draw, caching = self.draw, self.setup.caching
        common = [draw.randrange(20, 400) for _ in range(100)]
        found = []
        for number in range(count):
            prompt = [draw.randrange(20, 400) for _ in range(draw.randrange(1, 120))]
            if draw.random() < 0.5:
                prompt = common[: draw.randrange(10, 100)] + prompt
            size = self.setup.encoder_cache
            features = images(draw, prompt, size) if size else None
            output = draw.choice([1, 5, 20, 60, 200])
            more: dict[str, Any] = {"priority": draw.choice([0, 0, 0, -1, 2])}
            if draw.random() < 0.3:
                more["extra_args"] = {"service_tier": "flex"}
            if self.setup.loras:
                which = draw.randrange(1, 4)
                more["lora_request"] = LoRARequest(f"lora{which}", which, "/nowhere")
            at = draw.randrange(150)
            request = make_request(f"r{number}", prompt, output, caching=caching, mm_features=features, **more)
            found.append((at, request))
        return sorted(found, key=lambda job: job[0])

    def run(self) -> None:
        """Serve all requests, and check their tokens and that nothing is left."""
        jobs, depth = self.jobs(), 2 if self.setup.is_async else 1
        while jobs or self.scheduler.requests or self.scheduler.has_requests() or self.flights:
            while jobs and jobs[0][0] <= self.steps:
                request = jobs.pop(0)[1]
                self.scheduler.add_request(request)
                self.live.append(request)
            self._disturb()
            self._turn(depth)
            self.steps += 1
            assert self.steps < PATIENCE, "stalled"
        self._check_tokens()
        self._check_empty()

    def _turn(self, depth: int) -> None:
        scheduler, flights = self.scheduler, self.flights
        if scheduler.has_requests():
            output = scheduler.schedule(self.draw.random() < 0.1)
            self._check_mirrors(output)
            flights.append((output, self.shadow.run(output)))
        is_last = not scheduler.has_requests() or not flights[-1][0].num_scheduled_tokens
        if flights and (len(flights) >= depth or is_last):
            self._receive()

    def _receive(self) -> None:
        output, result = self.flights.pop(0)
        outputs_of = self.scheduler.update_from_output(output, result)
        if self.setup.drafts:
            drafts = self.shadow.draft(output.num_scheduled_tokens, self.setup.drafts, self.draw)
            self.scheduler.update_draft_token_ids(drafts)
        for outputs in outputs_of.values():
            for answer in outputs.outputs:
                self.got.setdefault(answer.request_id, []).extend(answer.new_token_ids)
                if answer.finish_reason is not None:
                    self.ends.append(answer.request_id)

    def _check_mirrors(self, output: Any) -> None:
        """Assert that the planner counts the tokens of each scheduled request as vLLM does."""
        for name in output.num_scheduled_tokens if self.cls is Scheduler else ():
            request, mirror = self.scheduler.requests[name], self.scheduler._mirrors[name]
            samples = request.num_output_placeholders  # AsyncScheduler counts them in either mode
            samples -= len(output.scheduled_spec_decode_tokens.get(name, ()))
            assert (mirror.progress.known, mirror.progress.planned) == (
                request.num_tokens,
                request.num_computed_tokens,
            ), name
            assert mirror.progress.pending_samples == samples, name

    def _disturb(self) -> None:
        draw, scheduler = self.draw, self.scheduler
        if self.live and draw.random() < 0.01:
            request = draw.choice(self.live)
            if not request.is_finished():
                scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
                self.aborted.add(request.request_id)
        if draw.random() < 0.003:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        if draw.random() < 0.003:
            self._sleep()
        if draw.random() < 0.02:
            scheduler.set_pause_state(draw.choice([PauseState.PAUSED_NEW, PauseState.PAUSED_ALL]))
        elif scheduler.pause_state is not PauseState.UNPAUSED and draw.random() < 0.2:
            scheduler.set_pause_state(PauseState.UNPAUSED)
        if not scheduler.has_requests() and not self.flights:
            scheduler.set_pause_state(PauseState.UNPAUSED)

    def _sleep(self) -> None:
        """Sleep and wake up as the engine does, with loss of all KV. Half of the sleeps abort all requests."""
        scheduler = self.scheduler
        if self.draw.random() < 0.5:
            ended = scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
            self.aborted |= {request.request_id for request in ended}
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while self.flights:
            self._receive()
        assert scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        self.shadow.slots.clear()
        scheduler.set_pause_state(PauseState.UNPAUSED)

    def _check_tokens(self) -> None:
        for request in self.live:
            if request.request_id not in self.aborted:
                tokens = list(request.prompt_token_ids)
                for _ in range(min(request.max_tokens, MAX_LEN - len(request.prompt_token_ids))):
                    tokens.append(next_token(tokens))
                assert self.got[request.request_id] == tokens[len(request.prompt_token_ids) :], request.request_id

    def _check_empty(self) -> None:
        scheduler = self.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        encoder = scheduler.encoder_cache_manager
        assert encoder.num_freeable_slots == encoder.cache_size
        assert not any((scheduler.running, scheduler.waiting, scheduler.kv_holding_waiting, scheduler.requests))
        ledger = scheduler._ledger
        ledger.refresh()
        assert not any((scheduler._mirrors, scheduler._flights, scheduler._compiling, ledger.holders()))
        assert ledger.device_free == ledger.device_total
        assert not ledger.is_moving
        assert ledger.tiers is None or ledger.tiers.cpu_free == ledger.tiers.cpu_total
        assert not scheduler._core.has_plans
