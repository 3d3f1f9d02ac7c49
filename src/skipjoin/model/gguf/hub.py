"""GGUF files on the hub, named OWNER/REPO:QUANTIZATION, as other programs name them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from skipjoin.model.gguf.file import SUFFIX, GgufError, model_stem

_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+):(?P<tag>[\w.-]+)")
_QUANTIZATION = re.compile(r"(?:^|[-._/])((?:I?Q\d\w*|TQ\d\w*|B?F16|F32|MXFP4\w*))$", re.IGNORECASE)
# Files beside a model: the projector of images.
_NO_MODEL = "mmproj"


class HubFile(NamedTuple):
    repository: str
    tag: str

    @classmethod
    def of(cls, name: str) -> HubFile | None:
        found = _NAME.fullmatch(name)
        return cls(found["repository"], found["tag"]) if found else None


def models_in(names: Sequence[str]) -> dict[str, list[str]]:
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(SUFFIX) and not name.rpartition("/")[2].lower().startswith(_NO_MODEL):
            models.setdefault(model_stem(name), []).append(name)
    return models


def tags_of(names: Sequence[str]) -> dict[str, list[str]]:
    return {_tag(stem): files for stem, files in models_in(names).items()}


def _tag(stem: str) -> str:
    found = _QUANTIZATION.search(stem)
    return found[1] if found else stem.rpartition("/")[2]


def models_of(folder: Path, files: Iterable[Path]) -> Iterator[tuple[str, Path, list[Path]]]:
    """Yield the suffix of each cached model's id, its path, and the files of a GGUF model."""
    names = [str(file.relative_to(folder)) for file in files]
    tags = {} if any(name.endswith(".safetensors") for name in names) else tags_of(names)
    for tag, parts in tags.items():
        yield f":{tag}", folder / parts[0], [folder / part for part in parts]
    if not tags:
        yield "", folder, []


def files_of(wanted: HubFile, names: Sequence[str]) -> list[str]:
    ends = re.compile(rf"(?:.*[-._/])?{re.escape(wanted.tag)}", re.IGNORECASE)
    found = {stem: files for stem, files in models_in(names).items() if ends.fullmatch(stem)}
    if not found:
        tags = ", ".join(tags_of(names))
        has = f"it has {tags}" if tags else "it has no GGUF file"
        raise GgufError(f"{wanted.repository} has no GGUF file of {wanted.tag}: {has}")
    if len(found) > 1:
        raise GgufError(
            f"{wanted.repository} has several GGUF files of {wanted.tag}: give more of the name, one of "
            f"{', '.join(stem.rpartition('/')[2] for stem in found)}"
        )
    return next(iter(found.values()))


def cached(wanted: HubFile) -> Path | None:
    from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415

    repository = Path(HF_HUB_CACHE) / f"models--{wanted.repository.replace('/', '--')}"
    # `snapshot_download` finds snapshots only if they are whole.
    try:
        folder = repository / "snapshots" / (repository / "refs/main").read_text(encoding="utf-8").strip()
        files = files_of(wanted, [str(file.relative_to(folder)) for file in folder.rglob(f"*{SUFFIX}")])
    except (OSError, GgufError):
        return None
    count = re.search(r"-of-(\d{5})\.gguf$", files[0])
    return folder / files[0] if len(files) == (int(count[1]) if count else 1) else None


def download(wanted: HubFile) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    files = files_of(wanted, files_on_hub(wanted.repository))
    return Path(snapshot_download(wanted.repository, allow_patterns=files)) / files[0]


def files_on_hub(repository: str) -> list[str]:
    """Return the names of a repository's files; listing them would retry for 25 s without a network."""
    from huggingface_hub import HfApi  # noqa: PLC0415

    return [file.rfilename for file in HfApi().model_info(repository).siblings or ()]
