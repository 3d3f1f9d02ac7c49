from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from skipjoin.forecast.mass import Array, mass_of
from skipjoin.forecast.store import STATE, described_field, read_arrays, read_description


def states(parent: Path) -> list[Path]:
    if not parent.is_dir():
        return []
    return sorted(folder for folder in parent.iterdir() if (folder / STATE).is_file())


def exported(folder: Path) -> Iterator[dict[str, Any]]:
    description = read_description(folder)
    arrays = read_arrays(folder, description)
    yield {"state": folder.name, "description": description} | _summary(arrays)
    if "model.index.tokens" in arrays:
        yield from _entries(folder.name, arrays)


def _summary(arrays: dict[str, Array]) -> dict[str, Any]:
    survival = mass_of(arrays["prior.ended"] / arrays["prior.reached"])
    found: dict[str, Any] = {"length_distribution": np.round(survival, 6).tolist()}
    if "model.index.vectors" in arrays:
        vectors = arrays["model.index.vectors"].astype(np.float32)
        center = vectors.mean(axis=0) if len(vectors) else np.zeros(1)
        found["vectors"] = {"width": vectors.shape[1], "mean_similarity": round(float(center @ center), 6)}
    return found


def _entries(name: str, arrays: dict[str, Array]) -> Iterator[dict[str, Any]]:
    tokens, exact, times = (arrays[f"model.index.{key}"] for key in ("tokens", "exact", "times"))
    for length, ended, at in zip(tokens.tolist(), exact.tolist(), times.tolist(), strict=True):
        yield {"state": name, "output_tokens": length, "exact": bool(ended), "time_s": at}


def states_of(parent: Path, served: str | None = None) -> list[Path]:
    return [folder for folder in states(parent) if served is None or described_field(folder, "served") == served]


def remove_states(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder)
