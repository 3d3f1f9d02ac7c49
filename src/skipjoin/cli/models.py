from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from skipjoin.cli.options import plain_errors
from skipjoin.cli.tables import Table

_GIB = 1 << 30


def pull(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Hub id, such as Qwen/Qwen3-0.6B, or OWNER/REPO:Q4_K_M.")
    ],
) -> None:
    """Download MODEL, so that a server starts without a network. HF_ENDPOINT and HF_TOKEN apply."""
    from skipjoin.model.config import ModelConfig  # noqa: PLC0415
    from skipjoin.model.folder import pull_model  # noqa: PLC0415

    with plain_errors():
        folder = pull_model(model)
        config = ModelConfig.from_folder(folder)
    print(f"{model}: {config.architecture}, context {config.max_positions} tokens, in {folder}")


def list_models() -> None:
    """List the downloaded models and whether this version can serve them."""
    from huggingface_hub import scan_cache_dir  # noqa: PLC0415
    from huggingface_hub.errors import CacheNotFound  # noqa: PLC0415

    from skipjoin.builtin import (  # noqa: PLC0415
        INSTALL_PACKAGED,
        MODEL_NAME,
        PACKAGED_NAME,
        packaged_model_path,
    )
    from skipjoin.model.config import ModelConfig  # noqa: PLC0415
    from skipjoin.model.errors import ModelError  # noqa: PLC0415
    from skipjoin.model.gguf.hub import models_of  # noqa: PLC0415

    table = Table("model", "GiB", "last used", "can be served", box=None)
    table.add_row(MODEL_NAME, "0.00", "", "yes (built in)")
    if (packaged := packaged_model_path()) is None:
        table.add_row(PACKAGED_NAME, "", "", f"no: {INSTALL_PACKAGED}")
    else:
        table.add_row(PACKAGED_NAME, f"{packaged.stat().st_size / _GIB:.2f}", "", "yes (installed package)")
    try:
        repositories = [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except CacheNotFound:
        repositories = []
    for cached in sorted(repositories, key=lambda repository: repository.repo_id):
        newest = max(cached.revisions, key=lambda revision: revision.last_modified, default=None)
        if newest is None:
            continue
        sizes = {file.file_path: file.size_on_disk for file in newest.files}
        for tag, model, files in models_of(newest.snapshot_path, sizes):
            try:
                ModelConfig.from_folder(model)
                verdict = "yes"
            except ModelError as error:
                verdict = f"no: {error}"
            size = sum(sizes[file] for file in files) / _GIB if tag else cached.size_on_disk / _GIB
            table.add_row(f"{cached.repo_id}{tag}", f"{size:.2f}", cached.last_accessed_str, verdict)
    Console().print(table)
