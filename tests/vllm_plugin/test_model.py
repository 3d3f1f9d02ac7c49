from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of vLLM's and torch's imports
    import torch
    from safetensors.torch import load_file, save_file
    from vllm import SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
    from vllm.v1.engine.llm_engine import LLMEngine

from skipjoin.core.events import Preemption

if not current_platform.is_cpu():
    pytest.skip("needs a build of vLLM for CPUs", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
SEQS, EOS, IMAGE = 2, 2, 9
IDS = dict(bos_token_id=1, eos_token_id=EOS, pad_token_id=0, max_position_embeddings=1024)
# Token 17 is the word w17. Every prefix of a text can be continued.
GRAMMAR = "(w[1-3][0-9]*)+"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from random_model import make_model  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("model") / "model"
    make_model(
        folder, torch.float32, num_hidden_layers=2, hidden_size=128, intermediate_size=256, num_attention_heads=2
    )
    return folder


def start(model: Path, **more: Any) -> LLMEngine:
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="0",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL="ERROR",
    )
    arguments: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": SEQS,
        "block_size": 32,
        "num_gpu_blocks_override": 24,
        "max_num_batched_tokens": 512,
        "scheduler_cls": "skipjoin.vllm.Scheduler",
        "additional_config": {"skipjoin": {"recipe": "fastserve"}},
    }
    made = LLMEngine.from_engine_args(EngineArgs(model=str(model), **{**arguments, **more}))
    scheduler_of(made).clock = partial(
        next, count(0.0, 1e-3)
    )  # what is preempted must not depend on the machine's load
    return made


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[LLMEngine]:
    made = start(model)
    yield made
    made.engine_core.shutdown()


def scheduler_of(engine: LLMEngine) -> Any:
    return engine.engine_core.engine_core.scheduler


def prompt(seed: int, length: int) -> dict[str, list[int]]:
    draw = random.Random(seed)
    return {"prompt_token_ids": [draw.randrange(10, 8000) for _ in range(length)]}


def params(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": tokens, "ignore_eos": True, **more})


def run(engine: LLMEngine, jobs: list[tuple[int, str, Any, SamplingParams]]) -> dict[str, Any]:
    """Serve requests that arrive in the given steps, and return their outputs in the order of their ends."""
    jobs, ended, step = sorted(jobs, key=lambda job: job[0]), {}, 0
    while jobs or engine.has_unfinished_requests():
        while jobs and jobs[0][0] <= step:
            _, name, text, chosen = jobs.pop(0)
            engine.add_request(name, text, chosen)
        for output in engine.step():
            if output.finished:
                ended[output.request_id] = output
        step += 1
    pool = scheduler_of(engine).kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert not getattr(scheduler_of(engine), "_mirrors", None)  # stock schedulers have none
    return ended


def tokens_of(output: Any) -> list[list[int]]:
    return [list(completion.token_ids) for completion in output.outputs]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"logprobs": 2},
        {"n": 2, "temperature": 1.0, "seed": 7},
        {"structured_outputs": StructuredOutputsParams(regex=GRAMMAR)},
    ],
    ids=["greedy", "logprobs", "n", "grammar"],
)
def test_preempted_requests_have_the_output_of_requests_alone(engine: LLMEngine, more: dict[str, Any]) -> None:
    paused = dict(scheduler_of(engine).tally.preempted)
    longs = [(0, f"long{number}", prompt(number, 40), params(120, **more)) for number in range(3)]
    shorts = [(40 + 5 * number, f"short{number}", prompt(50 + number, 12), params(12)) for number in range(4)]
    ended = run(engine, longs + shorts)
    assert all(name.startswith("short") for name in list(ended)[:4])
    assert sum(scheduler_of(engine).tally.preempted.values()) > sum(paused.values()) + 4
    alone = {}
    for _, name, text, chosen in longs + shorts:
        alone |= run(engine, [(0, name, text, chosen)])
    assert {name: tokens_of(output) for name, output in ended.items()} == {
        name: tokens_of(alone[name]) for name in ended
    }
    for name in ("long0", "long1", "long2") if "structured_outputs" in more else ():
        constrained = takewhile(lambda token: token != EOS, tokens_of(ended[name])[0])  # the grammar ends with it
        assert all(str(token)[0] in "123" for token in constrained)
    if "logprobs" in more:
        assert all(len(ended[name].outputs[0].logprobs) == 120 for name in ("long0", "long1", "long2"))


def crowded() -> list[tuple[int, str, Any, SamplingParams]]:
    """Return requests that do not fit the pool together, half of them with a common prefix."""
    draw, common = random.Random(3), prompt(999, 48)["prompt_token_ids"]
    jobs = []
    for number in range(16):
        text = prompt(100 + number, draw.randrange(8, 60))["prompt_token_ids"]
        text = {"prompt_token_ids": common + text if number % 2 else text}
        jobs.append((draw.randrange(0, 60), f"r{number}", text, params(draw.choice([16, 24, 120, 200]))))
    return jobs


def test_a_pool_that_is_too_small_for_all_keeps_outputs_and_prefixes(engine: LLMEngine) -> None:
    jobs = crowded()
    ended = run(engine, jobs)
    for _, name, text, chosen in jobs:
        assert tokens_of(run(engine, [(0, name, text, chosen)])[name]) == tokens_of(ended[name]), name


def test_an_abort_while_parked_disturbs_no_other_request(engine: LLMEngine) -> None:
    for number in range(2):
        engine.add_request(f"long{number}", prompt(number, 40), params(200))
    for _ in range(40):
        engine.step()
    engine.add_request("short", prompt(9, 12), params(40))
    engine.step()
    (parked,) = (request.request_id for request in scheduler_of(engine).kv_holding_waiting)
    kept, gone = ("long0", "long1") if parked.startswith("long1") else ("long1", "long0")
    engine.abort_request([gone])
    ended = run(engine, [])
    assert set(ended) == {kept, "short"}
    number = int(kept[-1])
    assert tokens_of(run(engine, [(0, kept, prompt(number, 40), params(200))])[kept]) == tokens_of(ended[kept])


def test_a_pause_of_the_engine_keeps_requests(engine: LLMEngine) -> None:
    core = engine.engine_core.engine_core
    engine.add_request("r", prompt(1, 20), params(60))
    for _ in range(10):
        engine.step()
    core.pause_scheduler(mode="keep", clear_cache=True)
    for _ in range(3):
        engine.step()
    core.resume_scheduler()
    ended = run(engine, [])
    assert tokens_of(run(engine, [(0, "r", prompt(1, 20), params(60))])["r"]) == tokens_of(ended["r"])


def write_layers(folder: Path, family: str) -> Path:
    """Write a model with layers of several kinds, which have KV cache groups of their own."""
    import transformers  # noqa: PLC0415

    from random_model import VOCAB, write_words  # noqa: PLC0415

    shape = dict(hidden_size=128, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, **IDS)
    shape |= dict(vocab_size=VOCAB)
    torch.manual_seed(0)
    if family == "gemma3":
        config = transformers.Gemma3TextConfig(
            **shape, head_dim=32, num_hidden_layers=6, sliding_window=64, sliding_window_pattern=3
        )
        made = transformers.Gemma3ForCausalLM(config)
    elif family == "gpt-oss":
        config = transformers.GptOssConfig(
            **shape, head_dim=32, num_hidden_layers=4, sliding_window=64, num_local_experts=4, num_experts_per_tok=2
        )
        made = transformers.GptOssForCausalLM(config)
    else:
        config = transformers.GraniteMoeHybridConfig(
            **shape,
            num_hidden_layers=4,
            layer_types=["mamba", "attention"] * 2,
            mamba_n_heads=8,
            mamba_d_head=32,
            mamba_d_state=16,
            mamba_n_groups=1,
            shared_intermediate_size=128,
            num_local_experts=0,
            position_embedding_type="rope",
            tie_word_embeddings=False,
        )
        made = transformers.GraniteMoeHybridForCausalLM(config)
    made.to(torch.float32).save_pretrained(folder)
    write_words(folder)
    return folder


@pytest.mark.parametrize(
    ("family", "groups", "caching"),
    [("gemma3", 3, True), ("gpt-oss", 2, True), ("granite", 2, False), ("granite", 2, True)],
)
def test_models_with_several_kv_cache_groups_have_the_texts_of_vllm(
    tmp_path: Path, family: str, groups: int, caching: bool
) -> None:
    more: dict[str, Any] = {"enable_prefix_caching": caching}
    if family == "granite":  # vLLM gives both groups blocks of one size
        more["block_size"] = None
    folder = write_layers(tmp_path, family)
    stock = start(folder, scheduler_cls=None, num_gpu_blocks_override=400, max_num_seqs=8, **more)
    jobs = crowded()
    expected = run(stock, jobs)
    stock.engine_core.shutdown()
    ours = start(folder, num_gpu_blocks_override=24 * groups, **more)
    assert len(scheduler_of(ours).kv_cache_config.kv_cache_groups) == groups
    ended = run(ours, jobs)
    assert {name: tokens_of(ended[name]) for name in ended} == {name: tokens_of(expected[name]) for name in ended}
    tally = scheduler_of(ours).tally
    assert tally.preempted[Preemption.PAUSE] > 20
    assert tally.preempted_by_vllm == 0
    ours.engine_core.shutdown()


def write_llava(folder: Path) -> Path:
    """Write a model that reads images of 56 x 56 pixels as 16 tokens each."""
    import transformers  # noqa: PLC0415

    from random_model import VOCAB, write_words  # noqa: PLC0415

    torch.manual_seed(0)
    shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**shape, image_size=56, patch_size=14, projection_dim=64),
        text_config=transformers.LlamaConfig(**shape, **IDS, vocab_size=VOCAB),
        image_token_index=IMAGE,
        image_seq_length=16,
    )
    transformers.LlavaForConditionalGeneration(config).to(torch.float32).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    # Names of older transformers, which published models have and vLLM reads.
    renamed = {name.replace("vision_tower.", "vision_tower.vision_model."): one for name, one in weights.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    write_words(folder)
    transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}),
        transformers.AutoTokenizer.from_pretrained(folder),
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token=f"w{IMAGE}",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return folder


def with_images(jobs: list[tuple[int, str, Any, SamplingParams]]) -> list[tuple[int, str, Any, SamplingParams]]:
    """Put up to two of four images into each prompt."""
    import numpy as np  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415

    draw, found = random.Random(5), []
    pixels = np.random.default_rng(0).integers(0, 256, (4, 56, 56, 3), np.uint8)
    for step, name, text, chosen in jobs:
        chosen_images = draw.choices(range(4), k=draw.randrange(3))
        tokens = list(text["prompt_token_ids"])
        for _ in chosen_images:
            tokens.insert(draw.randrange(len(tokens)), IMAGE)
        prompt = {"prompt_token_ids": tokens}
        if chosen_images:
            prompt["multi_modal_data"] = {"image": [Image.fromarray(pixels[number]) for number in chosen_images]}
        found.append((step, name, prompt, chosen))
    return found


def test_prompts_with_images_have_the_texts_of_vllm(tmp_path: Path) -> None:
    pytest.importorskip(
        "torchvision", reason="vLLM reads images with torchvision", exc_type=(ImportError, RuntimeError)
    )
    folder = write_llava(tmp_path)
    more: dict[str, Any] = {"limit_mm_per_prompt": {"image": 2}}
    stock = start(folder, scheduler_cls=None, num_gpu_blocks_override=400, max_num_seqs=8, **more)
    jobs = with_images(crowded())
    expected = run(stock, jobs)
    stock.engine_core.shutdown()
    ours = start(folder, **more)
    scheduler = scheduler_of(ours)
    scheduler.encoder_cache_manager = EncoderCacheManager(16)  # one image
    scheduler.max_num_encoder_input_tokens = 16
    ended = run(ours, jobs)
    assert {name: tokens_of(ended[name]) for name in ended} == {name: tokens_of(expected[name]) for name in ended}
    assert sum(scheduler.tally.preempted.values()) > 20
    ours.engine_core.shutdown()


def test_drafted_tokens_survive_preemption(engine: LLMEngine, model: Path) -> None:
    drafting = start(
        model,
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        },
    )
    scheduler, steps = scheduler_of(drafting), 0
    update = scheduler.update_from_output

    def checked(output: Any, result: Any) -> Any:
        nonlocal steps
        steps += any(len(tokens) > 1 for tokens in result.sampled_token_ids)
        found = update(output, result)
        for name, mirror in scheduler._mirrors.items():
            request, progress = scheduler.requests[name], mirror.progress
            assert (progress.known, progress.planned) == (request.num_tokens, request.num_computed_tokens), name
        return found

    scheduler.update_from_output = checked
    jobs = crowded()
    ended = run(drafting, jobs)
    assert steps > 20, "no drafts were accepted"
    assert sum(scheduler.tally.preempted.values()) > 20
    for _, name, text, chosen in jobs:
        assert tokens_of(run(engine, [(0, name, text, chosen)])[name]) == tokens_of(ended[name]), name
    drafting.engine_core.shutdown()


# The last test, because vLLM has one KV connector for all engines of a process.
def test_kv_from_the_cpu_tier_gives_the_same_output(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # An engine looks for kernels in all modules, and fails at those of the compiler that n-gram drafts import.
    for name in [name for name in sys.modules if name.startswith("llvmlite")]:
        monkeypatch.delitem(sys.modules, name)
    jobs = crowded()
    plain = start(model)  # another engine that ended took the process groups of `engine`, too
    alone = {}
    for _, name, text, chosen in jobs:
        alone |= run(plain, [(0, name, text, chosen)])
    plain.engine_core.shutdown()
    transfer = KVTransferConfig(
        kv_connector="CpuTier",
        kv_connector_module_path="skipjoin.vllm",
        kv_role="kv_both",
        kv_connector_extra_config={"cpu_gb": 0.01, "link_gb_s": 0.05},  # slow, so that moves are overlapped
    )
    tiered = start(model, kv_transfer_config=transfer)
    ended = run(tiered, jobs)
    assert scheduler_of(tiered).tally.preempted[Preemption.SWAP] > 4
    for name, output in ended.items():
        assert tokens_of(output) == tokens_of(alone[name]), name
