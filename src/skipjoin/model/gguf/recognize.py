from __future__ import annotations

import re
from typing import Any

from skipjoin.model.gguf.architecture import JOINED_QKV, QKV, Architecture
from skipjoin.model.gguf.architectures import ARCHITECTURES, VARIANTS
from skipjoin.model.gguf.file import Gguf, GgufError

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_OF_POSITIONS = {ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS}
_IN_LAYER = re.compile(r"blk\.(\d+)\.([\w.]+?)(\.weight|\.bias)?")
# Number of layers that predict further tokens.
_PREDICTING = "nextn_predict_layers"
# Those of older files are a tensor for each expert.
_ONE_EXPERT = re.compile(r"(ffn_\w+)\.\d+")


def architecture_of(file: Gguf) -> Architecture:
    """Return the architecture of a file; raise `GgufError` if it is unknown or has tensors that it lacks."""
    if (found := ARCHITECTURES.get(file.architecture)) is None:
        raise GgufError(
            f"{file.path} has architecture {file.architecture[:80]!r}, which is not supported in GGUF files; supported "
            f"are {', '.join(ARCHITECTURES)}: give a model of one of these"
        )
    if (variant := VARIANTS.get(file.architecture)) is not None:
        number = file.metadata.get(f"{file.architecture}.{variant[0]}")
        found = variant[1] if isinstance(number, int) and number > 0 else found
    known, predicting = found.parts, file.metadata.get(f"{file.architecture}.{_PREDICTING}")
    last = layers_of(file) if predicting else None
    for name in file.tensors:
        inner = _IN_LAYER.fullmatch(name)
        if inner and last is not None and int(inner[1]) >= last:
            continue
        if inner:
            is_known = known.issuperset(_stands_for(inner[2], known))
        else:
            is_known = name.rpartition(".")[0] in found.outer.values() or name in _OF_POSITIONS
        if not is_known:
            raise GgufError(
                f"{file.path} has a tensor {name[:80]!r}, which {found.name} lacks: it is of a variant that is not "
                "supported"
            )
    return found


def _stands_for(stored_part: str, known: frozenset[str]) -> frozenset[str]:
    if stored_part == JOINED_QKV and stored_part not in known:
        return QKV
    expert = _ONE_EXPERT.fullmatch(stored_part)
    return frozenset({f"{expert[1]}_exps" if expert else stored_part})


def layers_of(file: Gguf) -> Any:
    """Return the number of layers without those that predict further tokens, which come last and are not used."""
    found = [file.metadata.get(f"{file.architecture}.{key}", 0) for key in ("block_count", _PREDICTING)]
    if not all(isinstance(count, int) for count in found) or found[0] <= found[1]:
        raise GgufError(f"{file.path} has no {file.architecture}.block_count in its metadata: convert the model again")
    return found[0] - found[1]


def biased(file: Gguf, of: Architecture) -> dict[str, bool]:
    layers = (_IN_LAYER.fullmatch(name) for name in file.tensors if name.endswith(".bias"))
    having = frozenset[str]().union(*(_stands_for(found[2], of.parts) for found in layers if found))
    fields = {field: bool(having & parts) for field, parts in of.biases.items()}
    wanted = of.always_biased.union(*(parts for field, parts in of.biases.items() if fields[field]))
    if having != wanted:
        odd = ", ".join(sorted(having ^ wanted))
        raise GgufError(f"{file.path} has biases that {of.name} lacks, or lacks some that it has: those of {odd}")
    return fields
