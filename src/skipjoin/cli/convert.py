from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skipjoin.cli.options import plain_errors


def convert(
    source: Annotated[Path, typer.Argument(help="Folder whose weights are .bin files.")],
    target: Annotated[Path, typer.Argument(help="Folder to write; must not exist or be empty.")],
) -> None:
    """Create a safetensors copy of a model folder that has only .bin weights.

    This is the only command that reads pickled files, and it reads only tensors. Serving never reads them.
    """
    from skipjoin.cli.progress import Bars  # noqa: PLC0415
    from skipjoin.model.folder import bin_files  # noqa: PLC0415

    with plain_errors():
        bin_files(source)  # before torch is imported, which takes seconds
    from skipjoin.model.convert import convert_folder  # noqa: PLC0415

    with plain_errors(), Bars() as bars:
        task = bars.add_task("converting", total=None)
        convert_folder(source, target, lambda done, total: bars.update(task, completed=done, total=total))
    print(f"wrote {target}")
