"""Which models that also see or hear serve texts; docs/reference/models.md is made of the record.

PYTHONPATH=tests:tests/model python tests/model/composites.py    # writes it in five minutes; then: make reference

With names of architectures, it renews their rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from architectures import LENGTHS, MAX_PARAMETERS, NATIVE, REFUSED, RUNS, SMALL, TOLERANCE, UNTRIED, why, write_outcomes
from model_zoo import PagedRunner
from transformers.models.auto import modeling_auto as auto

from skipjoin.model import family
from skipjoin.model.errors import ModelError
from skipjoin.model.load_spec import LoadSpec
from skipjoin.model.loader import load_model

RECORD = Path(__file__).with_name("composites.json")
TEXTS = ("text_config", "language_config", "thinker_config", "llm_config", "decoder_config", "language_model_config")
OF_TEXT = SMALL | {"vocab_size": 160, "moe_num_experts": 4}
OF_WHOLE = {"vocab_size": 160, "hidden_size": 64, "projection_dim": 32}
# Fields of parts that see or hear.
OF_SENSES: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "embed_dim": 32},
    **{"num_key_value_heads": 2, "image_size": 28, "patch_size": 14, "depth": 1, "num_heads": 2, "d_model": 32},
    **{"out_hidden_size": 64, "projection_dim": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "num_layers": 1},
    **{"encoder_ffn_dim": 32, "decoder_layers": 1, "fullatt_block_indexes": [0], "deepstack_visual_indexes": [0]},
    **{"num_global_layers": 1, "mlp_dim": 32, "output_dim": 64, "num_position_embeddings": 16, "num_blocks": 1},
    **{"depths": [1] * 4, "hidden_sizes": [8] * 4, "text_hidden_size": 64, "audio_hidden_size": 32},
}
# Sections of rotary positions, whose sum is half of a head, and language models whose defaults have none.
SECTIONS = [2, 3, 3]
SECTIONED = (
    *("qwen2_5_omni_text", "qwen2_vl_text", "qwen2_5_vl_text", "paddleocr_vl_text", "glm4v_text", "glm4v_moe_text"),
    *("glm_ocr_text", "ernie4_5_vl_moe_text"),
)
# As published, where the default has layers of one kind.
KINDS = {"lfm2": ("conv", "full_attention")}
LARGEST = 5 * MAX_PARAMETERS
# Tokens that stand for images and sounds have ids within the small vocabulary, which no test has.
FIRST_TOKEN, USED = 150, 100
# The class of the whole leaves out the factor of logits, which the language model has.
UNSCALED = ("AyaVisionForConditionalGeneration", "Cohere2VisionForConditionalGeneration")


def composites() -> list[str]:
    tables = auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
    return sorted({name for table in tables for name in table.values()})


def small(fields: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of a configuration with small sizes, and those of its parts."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            is_sense = name.endswith("_config") or name in ("vision", "audio")
            found[name] = small(value, OF_TEXT if name in TEXTS else OF_SENSES) if is_sense else value
        else:
            fits = not isinstance(value, list) or isinstance(sizes.get(name), list)
            is_set = value is not None or name in ("num_key_value_heads", "head_dim")
            found[name] = sizes[name] if name in sizes and is_set and fits else value
    kind, layers, many = found.get("model_type"), found.get("num_hidden_layers"), fields.get("num_hidden_layers")
    if layers != many:
        found.pop("per_layer_config", None)
        for name, value in found.items():
            if isinstance(value, list) and len(value) == many and name != "layer_types":
                found[name] = value[:layers]
    if (kinds := found.get("layer_types")) and layers:
        kinds = KINDS.get(kind) or list(dict.fromkeys(kinds))
        found["layer_types"] = [kinds[layer % len(kinds)] for layer in range(layers)]
    if kind in SECTIONED and sizes is OF_TEXT:
        found["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": SECTIONS}
        found.setdefault("head_dim", OF_TEXT["head_dim"])
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(found.get(name), dict) and "mrope_section" in found[name]:
            found[name] = found[name] | {"mrope_section": SECTIONS}
    return found


def small_whole(kind: type[Any]) -> Any:
    fields = json.loads(json.dumps(kind.config_class().to_dict()))
    fields = small(fields, OF_WHOLE)
    ids = iter(range(FIRST_TOKEN, USED, -1))
    for part in (fields, *(part for part in fields.values() if isinstance(part, dict))):
        for name in sorted(part):
            is_id = name.endswith(("_token_id", "_token_index")) and isinstance(part[name], int)
            part[name] = next(ids) if is_id and part[name] >= USED else part[name]
    with torch.device("meta"):
        made = kind._from_config(kind.config_class.from_dict(fields))
    if (size := sum(parameter.numel() for parameter in made.parameters())) > LARGEST:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(1)
    return kind._from_config(kind.config_class.from_dict(fields), attn_implementation="eager").eval()


def outcome(name: str, folder: Path) -> tuple[str, str]:
    """Return how a model runs, and as which decoder or why not."""
    family._register_own()
    try:
        model = small_whole(getattr(transformers, name))
    except Exception as error:  # transformers raises anything
        return UNTRIED, f"no small configuration ({type(error).__name__})"
    for label, parameter in model.named_parameters():
        is_norm = "norm" in ".".join(label.split(".")[-3:]) and "weight" in label
        torch.nn.init.normal_(parameter, mean=float(is_norm), std=0.12 if parameter.dim() > 1 else 0.3)
    model.save_pretrained(folder)
    try:
        ours = load_model(folder, LoadSpec(dtype="float32"))
    except ModelError as error:
        return REFUSED, why(error).replace(str(folder), "its folder")
    sequences = [torch.randint(3, 90, (1, length)) for length in LENGTHS]
    found = PagedRunner(ours, [tokens[0].tolist() for tokens in sequences], 4, 3).run()
    for ids, logits in zip(sequences, found, strict=True):
        try:
            with torch.no_grad():
                expected = model(input_ids=ids).logits[0]
        except TypeError as error:
            return UNTRIED, f"transformers' class runs no texts alone: {error}"[:120]
        expected = expected * (ours.config.logit_scale if name in UNSCALED else 1)
        distance = float((logits - expected).norm() / (expected - expected.mean(-1, keepdim=True)).norm())
        if not distance <= TOLERANCE:
            raise AssertionError(f"{name} was loaded, and its logits differ by {distance:.2g}")
    is_part = ours.config.architecture != name
    return RUNS if ours.config.family == "transformers" else NATIVE, ours.config.architecture if is_part else ""


if __name__ == "__main__":
    write_outcomes(RECORD, "composites", composites(), outcome)
