from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from skipjoin.cli.options import plain_errors

_GIB = 1 << 30


def pull(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id, such as Qwen/Qwen3-0.6B.")],
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

    from skipjoin.builtin import MODEL_NAME  # noqa: PLC0415
    from skipjoin.model.config import ModelConfig, ModelError  # noqa: PLC0415

    table = Table("model", "GiB", "last used", "can be served", box=None)
    table.add_row(MODEL_NAME, "0.00", "", "yes (built in)")
    try:
        repositories = [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except CacheNotFound:
        repositories = []
    for one in sorted(repositories, key=lambda repository: repository.repo_id):
        newest = max(one.revisions, key=lambda revision: revision.last_modified, default=None)
        try:
            if newest is None:
                continue
            ModelConfig.from_folder(newest.snapshot_path)
            verdict = "yes"
        except ModelError as error:
            verdict = f"no: {error}"
        table.add_row(one.repo_id, f"{one.size_on_disk / _GIB:.2f}", one.last_accessed_str, verdict)
    Console().print(table)
