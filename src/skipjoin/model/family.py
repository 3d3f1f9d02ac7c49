from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib import import_module
from typing import Any, TypeVar

from skipjoin.model.plugins import PluginError, load_plugins

# Entry points of this group name the decoder class of a family.
ENTRY_POINTS = "skipjoin.families"
_BUILT_IN = (
    "llama", "opt", "gpt_neox", "starcoder2", "arcee", "gemma", "gemma4", "phi3", "olmo", "glm", "cohere", "moe",
    "scored", "deepseek", "gpt_oss", "bert", "rotary_encoders", "deberta", "lfm2", "qwen3_next", "granite_hybrid",
)  # fmt: skip

# Decoders by the types of parts of models that see, for which transformers has no class of a decoder. The positions of
# text are the same in all sections of theirs.
_TEXT_PARTS = {
    "glm4v_text": "Glm4ForCausalLM",
    "glm4v_moe_text": "Glm4MoeForCausalLM",
    "glm_ocr_text": "Glm4ForCausalLM",
    "qwen2_5_omni_text": "Qwen2ForCausalLM",
    "qwen3_omni_moe_text": "Qwen3MoeForCausalLM",
}
CLASSIFIER, _DECODER = "ForSequenceClassification", "ForCausalLM"
# Maps a parsed config.json and the name of its architecture to fields of `ModelConfig`.
ReadFields = Callable[[Mapping[str, Any], str], dict[str, Any]]
DecoderT = TypeVar("DecoderT", bound=type)


class FamilyError(PluginError):
    pass


@dataclass(frozen=True, slots=True)
class Family:
    """Attributes as in `family`; a family that is not native runs transformers' modeling code, on one rank.

    With `reads_whole`, `fields` reads all of config.json, not the settings of the language model alone.
    """

    name: str
    # A `Decoder`, whose module imports the configuration, which imports this one.
    decoder: type[Any]
    architectures: Mapping[str, str]
    fields: ReadFields
    prefix: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    is_native: bool = True
    reads_whole: bool = False


_families: dict[str, Family] = {}


def family(
    name: str,
    *,
    architectures: Mapping[str, str],
    fields: ReadFields,
    prefix: str,
    sizes: Mapping[str, int] | None = None,
) -> Callable[[DecoderT], DecoderT]:
    """Register the decorated `Decoder` class as the model family `name`.

    Args:
        architectures: Names in config.json, and the `model_type` of each, for files without names.
        fields: Returns the fields of `ModelConfig` that depend on the family. A `KeyError` names a missing value.
        prefix: Prefix of tensor names that checkpoints lack if they were saved from the bare decoder.
        sizes: Upper bounds of the family's own integers in config.json, which must be at least 1.
    """

    def register(decoder: DecoderT) -> DecoderT:
        made = Family(name, decoder, dict(architectures), fields, prefix, dict(sizes or {}))
        for other in _families.values():
            is_reloaded = _path(other.decoder) == _path(decoder)
            if other.name == name and not is_reloaded:
                raise FamilyError(
                    f"family {name!r} of {_path(decoder)} is registered by {_path(other.decoder)} already"
                )
            for architecture in architectures.keys() & other.architectures.keys() if not is_reloaded else ():
                raise FamilyError(
                    f"architecture {architecture} of family {name!r} belongs to family {other.name!r} already"
                )
        _families[name] = made
        return decoder

    return register


def family_named(name: str) -> Family:
    _register_own()
    return _families[name] if name in _families else _fallback()


def find_architecture(names: list[Any], model_type: str | None) -> tuple[str, Family]:
    _register_own()
    if not names and model_type in _TEXT_PARTS:
        names = [_TEXT_PARTS[model_type]]
    if (found := _find(names, model_type)) is None:
        load_plugins(
            ENTRY_POINTS,
            lambda loaded: any(family.decoder is loaded for family in _families.values()),
            "a decoder class with the decorator skipjoin.model.family.family",
        )
        found = _find(names, model_type)
    if found is None:  # the name of a decoder without an output, or with one for scores
        found = _find([_generating(name) for name in names], None) if names else None
    native = [name for family in _families.values() for name in family.architectures]
    if found is None and names:
        usual = [same for name in names if (same := same_name(name, native)) is not None]
        found = _find(usual, None) if usual else None
    if found is not None:
        return found
    # Imported lazily: transformers' modeling code takes seconds, and is needed for models without a family only.
    from skipjoin.model.fallback.settings import decoders, find, version  # noqa: PLC0415

    if (architecture := find(names, model_type)) is not None:
        return architecture, _fallback()
    asked = ", ".join(map(str, names or [model_type]))
    # The end that all have in common makes any two alike, unless it is misspelled.
    known = {name.removesuffix(_DECODER): name for name in (*native, *decoders())}
    near = get_close_matches(asked, known.values(), n=1, cutoff=0.93)
    near += [known[stem] for stem in get_close_matches(asked.removesuffix(_DECODER), known, n=1, cutoff=0.8)]
    raise FamilyError(
        f"architecture {asked} is not supported: it is none of Skipjoin's own, nor of the decoders in transformers "
        f"{version()}{f', which have {near[0]}' if near else ''} (docs/reference/models.md lists both). "
        "Code in a model's folder (auto_map) is never run: "
        "if there is a version of the model for transformers without it, often named -hf, or a GGUF file, give that"
    )


def find_whole(names: list[Any], model_type: str | None) -> tuple[str, Family] | None:
    """Return transformers' class of a model that also sees or hears."""
    from skipjoin.model.fallback.settings import wholes  # noqa: PLC0415 - as above

    known = wholes()
    found = next((same for name in names if (same := same_name(name, known.values())) is not None), None)
    found = found or known.get(model_type or "")
    return None if found is None else (found, replace(_fallback(), reads_whole=True))


def same_name(name: Any, known: Iterable[str]) -> str | None:
    """Return the known name that differs in case or underscores, as in files with code in their folder."""
    return next((other for other in known if _letters(other) == _letters(str(name))), None)


def _letters(name: str) -> str:
    return name.replace("_", "").lower()


def _fallback() -> Family:
    from skipjoin.model.fallback.decoder import FAMILY  # noqa: PLC0415 - as above

    return FAMILY


def _register_own() -> None:
    for module in _BUILT_IN:
        import_module(f"skipjoin.model.families.{module}")


def _find(names: list[Any], model_type: str | None) -> tuple[str, Family] | None:
    every = [(name, kind, family) for family in _families.values() for name, kind in family.architectures.items()]
    if not names:
        return next(((name, family) for name, kind, family in every if kind == model_type), None)
    known = {name: family for name, _, family in every}
    return next(((name, known[name]) for name in names if isinstance(name, str) and name in known), None)


def _generating(name: Any) -> Any:
    if not isinstance(name, str):
        return name
    if name.endswith(CLASSIFIER):
        return name.removesuffix(CLASSIFIER) + "ForCausalLM"
    return name.removesuffix("Model").removesuffix("Text") + "ForCausalLM" if is_bare(name) else name


def is_bare(name: str) -> bool:
    return name.endswith("Model") and not name.endswith("HeadModel")


def _path(decoder: type) -> str:
    return f"{decoder.__module__}.{decoder.__qualname__}"
