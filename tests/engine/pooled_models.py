"""Writes tiny models of vectors and scores, and their references in transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

if TYPE_CHECKING:
    import transformers

WIDTH, CONTEXT, SPECIAL = 64, 128, ["[PAD]", "[CLS]", "[SEP]"]
VOCAB = 256 + len(SPECIAL) + 2
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "pad_token_id": 1,
}
_ENCODER = {**_SHAPE, "max_position_embeddings": CONTEXT}
_DECODER = {**_SHAPE, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "head_dim": 32}
_ROBERTA = {**_SHAPE, "max_position_embeddings": CONTEXT + 2, "type_vocab_size": 1}
_PADDED = {**_SHAPE, "max_position_embeddings": CONTEXT + 2}
_DISTIL = {"vocab_size": VOCAB, "dim": WIDTH, "n_layers": 2, "n_heads": 4, "hidden_dim": 96}
_DISTIL |= {"max_position_embeddings": CONTEXT}
_MODERN = {**_ENCODER, "num_hidden_layers": 3, "local_attention": 20, "bos_token_id": 0, "eos_token_id": 2}
_MODERN |= {"cls_token_id": 0, "sep_token_id": 2}
_DEBERTA = {**_ENCODER, "relative_attention": True, "share_att_key": True, "position_biased_input": False}
_DEBERTA |= {"norm_rel_ebd": "layer_norm", "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "type_vocab_size": 0}
_BIASES = {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True}
_WHOLE = {**_DECODER, "use_bidirectional_attention": True, "sliding_window": 20, "query_pre_attn_scalar": 32}
_WHOLE |= {"layer_types": ["sliding_attention", "full_attention"]}
_LAST = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
# The class of the reference, its configuration, the pooling of sentence-transformers' files, and if they normalize.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None, bool]] = {
    "bert": ("BertModel", _ENCODER, None, True),
    "roberta-cls": ("RobertaModel", _ROBERTA, {"pooling_mode_cls_token": True}, False),
    "xlm-roberta-mlm": ("XLMRobertaForMaskedLM", _ROBERTA, {"pooling_mode": "mean"}, True),
    "qwen3-last": ("Qwen3ForCausalLM", _DECODER, _LAST, True),
    "qwen3-mean": ("Qwen3Model", _DECODER, {"pooling_mode_mean_tokens": True}, True),
    "distilbert": ("DistilBertModel", _DISTIL, {"pooling_mode": "mean"}, True),
    "mpnet-mlm": ("MPNetForMaskedLM", _PADDED, {"pooling_mode": "mean"}, True),
    "electra": ("ElectraModel", {**_ENCODER, "embedding_size": 32}, {"pooling_mode_cls_token": True}, False),
    "modernbert": ("ModernBertModel", _MODERN, {"pooling_mode_cls_token": True}, True),
    "modernbert-mlm-biases": ("ModernBertForMaskedLM", {**_MODERN, **_BIASES}, {"pooling_mode": "mean"}, False),
    "nomic": ("NomicBertModel", _ENCODER, {"pooling_mode": "mean"}, True),
    "gte": ("GteModel", _ENCODER, {"pooling_mode_cls_token": True}, True),
    "jina-v3": ("JinaEmbeddingsV3Model", {**_ENCODER, "type_vocab_size": 1}, {"pooling_mode": "mean"}, True),
    "deberta": ("DebertaV2Model", _DEBERTA, {"pooling_mode": "mean"}, True),
    "gte-untyped": ("GteForMaskedLM", {**_ENCODER, "type_vocab_size": 0}, {"pooling_mode_cls_token": True}, True),
    "gemma-whole": ("Gemma3TextModel", _WHOLE, {"pooling_mode": "mean"}, True),
    "qwen2-whole": ("Qwen2Model", {**_DECODER, "is_causal": False}, _LAST, True),
    "deberta-score": ("DebertaV2ForSequenceClassification", {**_DEBERTA, "num_labels": 1}, None, False),
    "bert-score": ("BertForSequenceClassification", {**_ENCODER, "num_labels": 1}, None, False),
    "xlm-roberta-score": ("XLMRobertaForSequenceClassification", {**_ROBERTA, "num_labels": 1}, None, False),
    "distilbert-score": ("DistilBertForSequenceClassification", {**_DISTIL, "num_labels": 1}, None, False),
    "mpnet-score": ("MPNetForSequenceClassification", {**_PADDED, "num_labels": 1}, None, False),
    "electra-score": ("ElectraForSequenceClassification", {**_ENCODER, "num_labels": 1}, None, False),
    "modernbert-score": ("ModernBertForSequenceClassification", {**_MODERN, "num_labels": 1}, None, False),
    "modernbert-mean-score": (
        "ModernBertForSequenceClassification",
        {**_MODERN, **_BIASES, "num_labels": 1, "classifier_pooling": "mean"},
        None,
        False,
    ),
    "nomic-score": ("NomicBertForSequenceClassification", {**_ENCODER, "num_labels": 1}, None, False),
    "gte-score": ("GteForSequenceClassification", {**_ENCODER, "num_labels": 1}, None, False),
    "qwen3-yes-no": ("Qwen3ForCausalLM", {**_DECODER, "max_position_embeddings": 512}, None, False),
    "qwen3-score": ("Qwen3ForSequenceClassification", {**_DECODER, "num_labels": 1}, None, False),
}
# Layers after the pooling, each with its activation, as in EmbeddingGemma.
_DENSE = {
    "gemma-whole": (
        torch.nn.Linear(WIDTH, 96, bias=False),
        torch.nn.Identity(),
        torch.nn.Linear(96, WIDTH),
        torch.nn.Tanh(),
    )
}


def write(name: str, folder: Path) -> transformers.PreTrainedModel:
    """Write a model with random parameters, norms and biases included, and return its reference."""
    import transformers  # noqa: PLC0415 - takes two seconds

    kind, fields, pooling, normalizes = MODELS[name]
    torch.manual_seed(sum(name.encode()))
    family = kind.removesuffix("Model").partition("For")[0]
    model = getattr(transformers, kind)(getattr(transformers, f"{family}Config")(**fields)).eval()
    for label, parameter in model.named_parameters():
        is_norm, spread = "norm" in label.lower() and "weight" in label, 0.12 if parameter.dim() > 1 else 0.3
        torch.nn.init.normal_(parameter, mean=1.0 if is_norm else 0.0, std=spread)
    model.save_pretrained(folder)
    _write_tokenizer(folder, has_pairs="qwen" not in name)
    if name in _DENSE:
        model.dense = torch.nn.Sequential(*_DENSE[name])
    if pooling is not None:
        _write_modules(folder, pooling, _DENSE.get(name, ()), normalizes=normalizes)
    return model


def _write_tokenizer(folder: Path, *, has_pairs: bool) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens(["yes", "no"])
    # As BERT's; Qwen3's embedding models add an end token alone.
    single = "[CLS] $A [SEP]" if has_pairs else "$A [SEP]"
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        pair="[CLS] $A [SEP] $B:1 [SEP]:1" if has_pairs else "$A $B [SEP]",
        special_tokens=[(token, 256 + index) for index, token in enumerate(SPECIAL)],
    )
    backend.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}{{ enable_thinking }}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def _write_modules(
    folder: Path, pooling: dict[str, Any], layers: Sequence[torch.nn.Module], *, normalizes: bool
) -> None:
    kinds = ["Transformer", "Pooling", *["Dense"] * (len(layers) // 2), *(["Normalize"] if normalizes else [])]
    parts = [
        {
            "idx": at,
            "name": str(at),
            "path": f"{at}_{kind}" if at else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for at, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(parts))
    if layers:
        prompts = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query"}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    for at, layer in enumerate(layers[::2]):
        path = folder / f"{2 + at}_Dense"
        path.mkdir()
        kind = f"torch.nn.modules.activation.{type(layers[2 * at + 1]).__name__}"
        sizes = {"in_features": layer.in_features, "out_features": layer.out_features, "bias": layer.bias is not None}
        (path / "config.json").write_text(json.dumps({**sizes, "activation_function": kind}))
        save_file(
            {f"linear.{label}": one.detach() for label, one in layer.named_parameters()}, path / "model.safetensors"
        )
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": WIDTH, **pooling}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": CONTEXT // 2}))
