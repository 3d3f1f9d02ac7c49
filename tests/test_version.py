"""The installation commands that error messages suggest."""

from __future__ import annotations

from pathlib import Path

from skipjoin.version import install_command


def test_install_command_of_an_extra_for_clone_and_index(tmp_path: Path) -> None:
    """The command works in any folder."""
    assert install_command("distributed", tmp_path) == "pip install 'skipjoin[distributed]'"
    clone = Path(__file__).parents[1]
    assert install_command("distributed") == f"pip install -c '{clone}/constraints.txt' -e '{clone}[distributed]'"
    assert (clone / "constraints.txt").is_file()
