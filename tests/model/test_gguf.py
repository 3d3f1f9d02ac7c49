"""GGUF files: numbers, tokens and settings equal to those of the checkpoint that a file was made from."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from model_zoo import CONFIGS, VOCAB, PagedRunner, make_reference
from safetensors.torch import load_file
from test_model_tokenizer import byte_fallback
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from skipjoin.core.events import Preempted, Preemption
from skipjoin.llm import LLM
from skipjoin.model.config import ModelConfig
from skipjoin.model.errors import ModelError
from skipjoin.model.folder import check_model, model_files, model_id
from skipjoin.model.generation_config import sampling_defaults
from skipjoin.model.gguf.file import Gguf, read_gguf
from skipjoin.model.gguf.groups import LAYOUTS
from skipjoin.model.gguf.tokenizer import gguf_tokenizer
from skipjoin.model.gguf.weights import GgufWeights
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model, planned_model, read_config
from skipjoin.model.ops.build import load_library
from skipjoin.model.ops.torch_ops import TorchOps
from skipjoin.model.tokenizer import load_tokenizer
from skipjoin.model.weight_files import Source
from skipjoin.model.weight_format import format_of
from skipjoin.model.weights import Matrix, Stack, Weights
from skipjoin.sampling import SamplingParams
from support.gguf_files import Kind, described, plain_tokens, small_llama, write_model
from support.worlds import exhaustive, halved

WRITTEN = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.MXFP4, Kind.TQ2_0]
READ = [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS, Kind.IQ3_S, Kind.IQ2_XS]
# llama.cpp has no such architecture.
_NOT_IN_GGUF = ("opt", "opt-after", "ministral", "qwen3-moe-dense", "helium", "cwm", "solar-open")
# Their tensors in files are not read.
_NOT_IN_GGUF += ("deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "glm4-moe-lite", "youtu")
FAMILIES = [name for name in CONFIGS if name not in _NOT_IN_GGUF and not name.endswith("-window")]
DELTA = ["qwen3.5", "qwen3.5-moe", "qwen3-next"]
FAMILIES += ["lfm2", "lfm2-moe", "lfm2-biases", *DELTA, "granite-hybrid", "granite-hybrid-experts"]
# Those that are made of the same parts as others.
ALIKE = {
    "glm",
    "cohere2",
    "exaone4",
    "olmoe",
    "olmo3",
    "granite-moe",
    "ministral3",
    "lfm2-biases",
    "llama-linear",
    "qwen3-next",
    "dots1",
    "minimax-m2",
    "seed-oss",
    "ernie4.5",
}
CASES = [exhaustive(name) if name in ALIKE else name for name in FAMILIES]
# Reading the numbers and computing with the codes share the mapping of names and shapes; each has every second family.
NUMBERS, CODES = (
    [exhaustive(name) if name in ALIKE or at % 2 != odd else name for at, name in enumerate(FAMILIES)] for odd in (0, 1)
)
TEXTS = [
    *("the quick brown fox, hello world!", "In 2024,  1234567 numbers", "  leading and trailing  ", "don't We'LL I'M"),
    *("naïve café — ok 😀👍🏽", "数字 你好世界 123", "def f(x):\n    return x**2\n\n\n  # done\t\ttabs", "x²½ ⅷ ٣٤"),
    *(
        "e\u0301cole A\u030angstro\u0308m",
        "a <think> b<|user|> c",
        "a/b//c ... [x] {y}\r\n\r\n",
        "",
        " ",
        "A1B22C333D4444",
    ),
]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
PLAIN = LoadSpec(dtype="float32", attention="torch")


_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_LATER_LAYERS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
_DELTA_LAYERS = ["linear_attention", "full_attention"] * 2
_DELTA = {"num_hidden_layers": 4, "layer_types": _DELTA_LAYERS, "linear_key_head_dim": 32}
# Settings that files do not have, or have for some layers only.
_CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32},
    "mixtral": {"sliding_window": None},
    "dots1": {"sliding_window": None, "num_key_value_heads": 4},
    "gpt-oss": {"rope_parameters": _YARN | {"truncate": False}},
    "cohere2": {"attention_bias": False, **_LATER_LAYERS},
    "exaone4": _LATER_LAYERS,
    "olmo3": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": _YARN,
        },
        **_LATER_LAYERS,
    },
    "ministral3": {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}},
    "lfm2-biases": {"conv_bias": False},
    "lfm2-moe": {"routed_scaling_factor": 1.0},
    "olmoe": {"num_key_value_heads": 4},
    "granite-hybrid": {"intermediate_size": 64},  # of all MLPs
    "granite-hybrid-experts": {"mamba_proj_bias": False, "time_step_limit": (0.0, float("inf"))},
    # The layers of files come in turns, and all have experts if one has.
    "qwen3-next": {"mlp_only_layers": [], **_DELTA},
    "qwen3.5": _DELTA,
    "qwen3.5-moe": _DELTA,
}


def reference_of(name: str, **changes: Any) -> Any:
    return make_reference(name, **_CHANGES.get(name, {}) | changes)


def logits(model, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, VOCAB, (count,), generator=generator).tolist() for count in (1, 9, 30)]
    return PagedRunner(model, tokens, 4, seed).run()


class _Kept(TorchOps):
    """Operations whose products are their weights."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None = None) -> Any:
        return weight


def stacked(weights: Weights, name: str, shape: torch.Size, *, is_transposed: bool) -> Any:
    """Return the matrix [out, in] of each expert of a tensor that has all, which is [in, out] if `is_transposed`."""
    count, *sizes = shape
    out, inputs = sizes[::-1] if is_transposed else sizes
    return weights.stacked(_Kept(), Stack(name, count, out, inputs, is_transposed=is_transposed), None)


def check(path: Path, reference, folder: Path, spec: LoadSpec = PLAIN) -> None:
    """Check that a file has the numbers of a model, to the last bit, and that they give its logits."""
    reference.save_pretrained(folder)
    files = model_files(str(path))
    of = Source(files, spec, read_config(files, spec), torch.float32, torch.device("cpu"))
    weights = format_of(files, PLAIN).open(of)
    for name, stored in load_file(folder / "model.safetensors").items():
        # A row in ERNIE's checkpoints.
        tensor = stored.flatten() if name.endswith("e_score_correction_bias") else stored
        if tensor.dim() == 3 and "conv" not in name:
            turned = reference.config.model_type == "gpt_oss"
            experts = stacked(weights, name, tensor.shape, is_transposed=turned)
            for found, expert in zip(experts, tensor, strict=True):
                assert torch.equal(found, expert.T if turned else expert), name
            continue
        if name.endswith(".A_log"):  # files have its exponential
            torch.testing.assert_close(weights.take(name, *tensor.shape), tensor, atol=1e-6, rtol=1e-6)
            continue
        assert torch.equal(weights.take(name, *tensor.shape), tensor), name
        if not name.endswith("proj_bias"):
            half = range(tensor.shape[0] // 2)
            assert torch.equal(weights.take(name, *tensor.shape, rows=half), tensor[: len(half)]), name
        if tensor.dim() == 2 and tensor.shape[1] >= 64 and not name.endswith("_bias"):
            taken = weights.take(name, *tensor.shape, columns=range(32, 64))
            assert torch.equal(taken, tensor[:, 32:64]), name
    found, expected = (logits(load_model(source, spec)) for source in (path, folder))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NUMBERS)
def test_logits_of_each_family_equal_those_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    reference = reference_of(name)
    write_model(tmp_path / "m.gguf", reference, Kind.Q8_0)
    check(tmp_path / "m.gguf", reference, tmp_path / "folder")


@pytest.mark.parametrize("name", ["mixtral", exhaustive("glm"), exhaustive("qwen2"), exhaustive("granite-moe")])
def test_older_files_have_tensors_of_single_experts_and_joined_projections(name: str, tmp_path: Path) -> None:
    reference = reference_of(name, **({"attention_bias": True} if name == "glm" else {}))
    write_model(tmp_path / "m.gguf", reference, Kind.Q8_0, is_older=True)
    check(tmp_path / "m.gguf", reference, tmp_path / "folder")
    files, spec = model_files(str(tmp_path / "m.gguf")), LoadSpec(dtype="float32")
    names = {"blk.0.attn_qkv.weight"} | ({"blk.0.ffn_gate.3.weight"} if name == "mixtral" else set())
    assert names <= read_gguf(files.folder).tensors.keys()
    planned = planned_model(files, read_config(files, spec), spec)
    assert planned.weight_bytes <= load_model(files.folder, spec).weight_bytes, "codes are not found"


# Codes below are compared with numbers, too.
@pytest.mark.parametrize("kind", [*halved(WRITTEN), *halved(READ)], ids=lambda kind: kind.name)
def test_numbers_of_each_type_are_those_of_the_reference(kind: Kind, tmp_path: Path) -> None:
    reference = small_llama(hidden_size=256)
    write_model(tmp_path / "m.gguf", reference, kind)
    check(tmp_path / "m.gguf", reference, tmp_path / "folder")
    if kind in (Kind.Q4_K, Kind.F16):
        check(tmp_path / "m.gguf", reference, tmp_path / "folder", LoadSpec(dtype="float32", quantization="int8"))
    files = model_files(str(tmp_path / "m.gguf"))
    assert read_config(files, PLAIN).dtype_name == {Kind.F32: "float32", Kind.F16: "float16"}.get(kind, "bfloat16")
    assert (
        planned_model(files, read_config(files, PLAIN), PLAIN).weight_bytes
        == load_model(files.folder, PLAIN).weight_bytes
    )


@pytest.mark.skipif(load_library() is None, reason="no compiler")
@pytest.mark.parametrize(
    "kind", [kind for kind in (*WRITTEN, *READ) if kind.name in LAYOUTS], ids=lambda kind: kind.name
)
def test_codes_of_each_type_are_those_of_the_reference(kind: Kind, tmp_path: Path) -> None:
    reference = small_llama(hidden_size=256)
    write_model(tmp_path / "m.gguf", reference, kind)
    files, spec = model_files(str(tmp_path / "m.gguf")), LoadSpec(dtype="float32")
    config = read_config(files, spec)
    weights = GgufWeights(Source(files, spec, config, torch.float32, torch.device("cpu"), reads_codes=True))
    # Scales of these are products of two numbers, and rounded to float16.
    limit = 4e-4 if kind.name.endswith(("_K", "_XS")) else 0
    for name, rows in (("model.layers.0.self_attn.k_proj", 128), ("model.layers.0.mlp.down_proj", 256)):
        exact = weights.take(f"{name}.weight", rows, 256)
        found = weights.grouped(Matrix(name, rows, range(32, 96)), 256, range(64, 160))
        assert found is not None
        part = exact[32:96, 64:160]
        assert (found.widened() - part).norm() <= limit * part.norm()
        assert weights.grouped(Matrix(name, rows, range(rows)), 256, range(8, 160)) is None  # no whole groups
    assert weights.label == kind.name
    model, planned = load_model(files.folder, spec), planned_model(files, config, spec)
    assert model.weight_label == kind.name
    assert planned.weight_bytes <= model.weight_bytes < load_model(files.folder, PLAIN).weight_bytes / 2
    for ours, expected in zip(logits(model), logits(load_model(files.folder, PLAIN)), strict=True):
        assert (ours - expected).norm() <= 0.04 * expected.norm()


@pytest.mark.skipif(load_library() is None, reason="no compiler")
@pytest.mark.parametrize("name", [name for name in CODES if name not in DELTA])
def test_products_of_codes_serve_each_family(name: str, tmp_path: Path) -> None:
    reference = reference_of(name)
    write_model(tmp_path / "m.gguf", reference, Kind.Q8_0)
    ours, expected = (
        torch.cat(logits(load_model(tmp_path / "m.gguf", of))) for of in (LoadSpec(dtype="float32"), PLAIN)
    )
    errors = (ours - expected).norm(dim=1) / expected.norm(dim=1)
    # Rounding may choose another expert.
    assert (errors.median() if load_model(tmp_path / "m.gguf", PLAIN).config.experts else errors.mean()) <= 0.04


@pytest.mark.skipif(load_library() is None, reason="no compiler")
@pytest.mark.parametrize("name", [DELTA[0], *map(exhaustive, DELTA[1:])])
def test_codes_of_a_delta_rule_are_those_of_its_checkpoint_in_8_bits(name: str, tmp_path: Path) -> None:
    reference = reference_of(name)
    write_model(tmp_path / "m.gguf", reference, Kind.Q8_0)
    reference.save_pretrained(tmp_path / "folder")
    ours = logits(load_model(tmp_path / "m.gguf", LoadSpec(dtype="float32")))
    rounded = load_model(tmp_path / "folder", LoadSpec(dtype="float32", quantization="int8"))
    one, expected = torch.cat(ours), torch.cat(logits(rounded))
    errors = (one - expected).norm(dim=1) / expected.norm(dim=1)
    # Inputs are rounded, too, where a difference in the last bit may decide.
    assert errors.median() <= 1e-5
    assert errors.max() <= 0.04


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    number = gguf.GGUFValueType.UINT32
    more = {"qwen35.block_count": (5, number), "qwen35.nextn_predict_layers": (1, number)}
    write_model(tmp_path / "m.gguf", reference_of("qwen3.5"), metadata=more, extra={"blk.4.nextn.enorm.weight": 64})
    assert ModelConfig.from_folder(tmp_path / "m.gguf").num_layers == 4


@pytest.mark.skipif(load_library() is None, reason="no compiler")
def test_experts_of_gpt_oss_stay_in_codes(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", reference_of("gpt-oss"), Kind.MXFP4)
    files, spec = model_files(str(tmp_path / "m.gguf")), LoadSpec(dtype="float32")
    model, wide = (load_model(files.folder, wanted) for wanted in (spec, PLAIN))
    assert model.weight_label == "MXFP4"
    assert planned_model(files, model.config, spec).weight_bytes <= model.weight_bytes < wide.weight_bytes / 2
    for ours, expected in zip(logits(model), logits(wide), strict=True):
        errors = (ours - expected).norm(dim=1) / expected.norm(dim=1)
        assert errors.median() <= 0.03


def test_a_tokenizer_keeps_no_header(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_vocabulary(path, described(_smollm(), "smollm"))
    assert load_tokenizer(path).encode("a")
    held = [found for found in gc.get_objects() if isinstance(found, Gguf) and found.path == path]
    assert not held, "the vocabulary is in memory twice"


def test_parts_of_an_answer_do_not_end_it(tmp_path: Path) -> None:
    tokenizer = {**described(_smollm(), "smollm"), "ids": {"eos": 0}}
    for index, text in ((0, "<|return|>"), (1, "<|end|>"), (5, "<|call|>")):
        tokenizer["tokens"][index], tokenizer["types"][index] = text, 3
    write_vocabulary(tmp_path / "m.gguf", tokenizer)
    assert ModelConfig.from_folder(tmp_path / "m.gguf").eos_token_ids == (0, 5)


def _byte_level(split: pre_tokenizers.PreTokenizer, *, composes: bool = False, keeps_words: bool = False) -> Backend:
    """Return a trained tokenizer as transformers makes it of a model's own files."""
    backend = Backend(models.BPE(ignore_merges=keeps_words))
    if composes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>", "<|user|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXTS * 5, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    return backend


def _regex(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _smollm() -> Backend:
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True)
    return _byte_level(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain]))


def _qwen() -> Backend:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX  # noqa: PLC0415 - imports torch

    return _byte_level(_regex(PRETOKENIZE_REGEX), composes=True)


def _gpt4o() -> Backend:
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    start, end = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rest = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return _byte_level(_regex(f"{start}{upper}*{lower}+{end}|{start}{upper}+{lower}*{end}|{rest}"))


def _llama() -> Backend:
    digits = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return _byte_level(
        _regex(rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"), keeps_words=True
    )


def _deepseek_coder() -> Backend:
    words = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+")
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in words]
    digits, plain = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False, use_regex=False)
    return _byte_level(pre_tokenizers.Sequence([*splits, digits, plain]))


TOKENIZERS = {
    "gpt-2": lambda: _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "smollm": _smollm,
    "starcoder": _smollm,
    "qwen2": _qwen,
    "llama-bpe": _llama,
    "gpt-4o": _gpt4o,
    "deepseek-coder": _deepseek_coder,
}


def write_vocabulary(path: Path, tokenizer: dict[str, Any]) -> None:
    write_model(path, small_llama(vocab_size=len(tokenizer["tokens"]), hidden_size=32), tokenizer=tokenizer)


@pytest.mark.parametrize("pre", TOKENIZERS)
def test_byte_level_tokenizer_gives_the_ids_of_its_source(pre: str, tmp_path: Path) -> None:
    source = TOKENIZERS[pre]()
    ids = {"eos": 0, "bos": 1}
    write_vocabulary(tmp_path / "m.gguf", described(source, pre, ids=ids, flags={"add_bos_token": True}))
    ours = load_tokenizer(tmp_path / "m.gguf")
    assert ours.eos_token_ids == (0,)
    assert ours.special_ids == {0, 1}
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=False) == source.encode(text).ids, text
        assert ours.encode(text) == [1, *source.encode(text).ids], text
        assert ours.decode(ours.encode(text)) == source.decode(source.encode(text).ids), text


@pytest.mark.parametrize("kind", ["with a prefix", "without", "gemma4"])
def test_sentencepiece_tokenizer_gives_the_ids_of_its_source(kind: str, tmp_path: Path) -> None:
    source, has_prefix = byte_fallback(), kind == "with a prefix"
    raw = json.loads(source.to_str())
    tokens = [source.id_to_token(index) for index in range(source.get_vocab_size())]
    merges = raw["model"]["merges"]
    ranks = {"".join(pair): -float(rank) for rank, pair in enumerate(merges, 1)}
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    if not has_prefix:
        source.normalizer = normalizers.Replace(" ", "\u2581")
        source.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    order = {"model": "llama", "scores": [ranks.get(token, -1e6) for token in tokens]}
    if kind == "gemma4":
        order = {"model": kind, "pre": kind, "merges": [" ".join(pair) for pair in merges]}
    write_vocabulary(
        tmp_path / "m.gguf",
        {
            **order,
            "tokens": tokens,
            "types": types,
            "ids": {"bos": 1, "eos": 2, "unknown": 0},
            "flags": {} if has_prefix or kind == "gemma4" else {"add_space_prefix": False},
        },
    )
    ours = load_tokenizer(tmp_path / "m.gguf")
    for text in TEXTS:
        ids = source.encode(text).ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == source.decode(ids), text


def test_special_tokens_of_phi3_take_the_spaces_after_them(tmp_path: Path) -> None:
    words = plain_tokens(101)
    tokens, file, kind = [*words["tokens"]], tmp_path / "m.gguf", gguf.GGUFValueType.STRING
    tokens[:5] = ["<unk>", "<s>", "<|end|>", "\u2581", "\n"]
    given = words | {
        "model": "llama",
        "tokens": tokens,
        "types": [2, 3, 3, *[1] * 98],
        "scores": [0.0] * 101,
        "ids": {},
    }
    for architecture, (after_end, after_bos) in {"phi3": (1, 3), "llama": (4, 3)}.items():
        metadata = {"general.architecture": (architecture, kind)}
        write_model(file, small_llama(hidden_size=32), tokenizer=given, metadata=metadata)
        ours = gguf_tokenizer(file)
        assert len(ours.encode("<|end|> \n", add_special_tokens=False)) == after_end
        assert len(ours.encode("<s>\n", add_special_tokens=False)) == after_bos


def test_tokens_are_those_of_the_numbers_whatever_is_preempted(tmp_path: Path) -> None:
    source = _smollm()
    ids, template = {"eos": 0, "bos": 1}, "{{ messages[0].content }}<|user|>"
    tokenizer = described(source, "smollm", ids=ids, template=template)
    reference = small_llama(vocab_size=len(tokenizer["tokens"]), hidden_size=64, num_hidden_layers=2)
    file = tmp_path / "small.gguf"
    write_model(file, reference, Kind.Q4_0, tokenizer=tokenizer)
    reference.save_pretrained(tmp_path / "folder")
    source.save(str(tmp_path / "folder/tokenizer.json"))
    found, evictions = [], 0
    settings = {"dtype": "float32", "threads": 1, "profile": "off", "recipe": "fastserve", "swap_space_gib": 1e-4}
    # The last pool holds two requests or three of six.
    cases = ((tmp_path / "folder", 0.01, "torch"), (file, 0.01, "torch"), (file, 0.01, "auto"), (file, 8e-5, "auto"))
    for model, pool, attention in cases:
        options = {**settings, "attention": attention, "kv_cache_gib": pool}
        with LLM(str(model), block_size=4, max_model_len=100, **options) as llm:
            take_events = llm.engine.core.take_events

            def counted(take_events=take_events):
                nonlocal evictions
                events = take_events()
                evictions += sum(isinstance(event, Preempted) and event.how is not Preemption.PAUSE for event in events)
                return events

            llm.engine.core.take_events = counted
            found.append([output.token_ids for output in llm.generate(TEXTS[:6], GREEDY)])
            if model == file:
                assert llm.tokenizer.chat_text([{"role": "user", "content": "hi"}]) == "hi<|user|>"
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert evictions > 0


def test_parts_are_read_as_one_model(tmp_path: Path) -> None:
    reference = make_reference("qwen3")
    write_model(tmp_path / "m.gguf", reference, Kind.Q8_0, tensors_per_part=9)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [part.name for part in parts[:2]] == ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf"]
    check(parts[0], reference, tmp_path / "folder")
    for name in (parts[1], tmp_path):
        assert check_model(str(name)) == parts[0]
    assert model_id(str(parts[0]), parts[0]) == "m"
    assert model_id(str(tmp_path), parts[0]) == tmp_path.name
    parts[1].rename(tmp_path / "moved")
    with pytest.raises(ModelError, match=r"is one of 3 parts, and .* lacks m-00002-of-00003\.gguf: download"):
        check_model(str(tmp_path))


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_factor_without_a_kind_is_that_of_linear_scaling(key: str, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_model(file, small_llama(hidden_size=32), metadata={f"llama.{key}": (4.0, gguf.GGUFValueType.FLOAT32)})
    assert (rope := ModelConfig.from_folder(file).rope) is not None
    assert (rope.scaling, rope.factor) == ("linear", 4.0)


@pytest.mark.parametrize(("pattern", "windows"), [(0, (9, 9, 9)), (1, (0, 0, 0)), (2, (9, 0, 9)), (3, (9, 9, 0))])
def test_pattern_of_windows_may_be_a_number(pattern: int, windows: tuple[int, ...], tmp_path: Path) -> None:
    file, kind = tmp_path / "m.gguf", gguf.GGUFValueType.UINT32
    numbers = {"block_count": 3, "attention.sliding_window": 9, "attention.sliding_window_pattern": pattern}
    metadata = {f"gemma3.{key}": (value, kind) for key, value in numbers.items()}
    write_model(file, small_llama(hidden_size=32), metadata=metadata, architecture="gemma3")
    assert ModelConfig.from_folder(file).windows == windows


def test_weights_of_experts_add_up_to_one_if_the_file_says_so(tmp_path: Path) -> None:
    file, kind = tmp_path / "m.gguf", gguf.GGUFValueType.BOOL
    for name, usual in (("olmoe", False), ("qwen3-moe", True)):
        for given in (None, False, True):
            model = reference_of(name)
            architecture = {"olmoe": "olmoe", "qwen3-moe": "qwen3moe"}[name]
            metadata = {} if given is None else {f"{architecture}.expert_weights_norm": (given, kind)}
            write_model(file, model, metadata=metadata)
            experts = ModelConfig.from_folder(file).experts
            assert experts is not None
            assert experts.among_chosen is (usual if given is None else given)


def test_settings_are_those_of_the_metadata(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "m.gguf"
    tokenizer = {**described(_smollm(), "smollm"), "ids": {"eos": 0, "bos": 1, "eot": 5}, "template": "plain"}
    tokenizer["tokens"][1], tokenizer["tokens"][5] = "<|im_end|>", "<|eot|>"
    metadata = {
        "general.sampling.temp": (0.7, gguf.GGUFValueType.FLOAT32),
        "general.sampling.top_k": (7, gguf.GGUFValueType.INT32),
        "tokenizer.chat_template.tool_use": ("with tools", gguf.GGUFValueType.STRING),
    }
    write_model(
        file, small_llama(vocab_size=len(tokenizer["tokens"])), Kind.IQ3_S, tokenizer=tokenizer, metadata=metadata
    )
    assert sampling_defaults(file) == {"temperature": 0.7, "top_k": 7}
    assert sampling_defaults(file, "none") == {}
    assert ModelConfig.from_folder(file).eos_token_ids == (0, 5, 1)
    ours = load_tokenizer(file)
    assert ours.eos_token_ids == (0, 5, 1)
    assert ours.chat_template is not None
    assert ours.chat_template.source == "plain\nwith tools"
    with caplog.at_level("INFO"):
        load_model(file, LoadSpec(dtype="bfloat16"))
    assert "m.gguf: 9 IQ3_S tensors are widened to bfloat16, which makes 1.2 MB of 0.3 MB" in caplog.text
