"""What users are told to install."""

from __future__ import annotations

from pathlib import Path

from skipjoin.version import install_command


def test_an_extra_is_installed_from_a_clone_or_from_an_index(tmp_path: Path) -> None:
    """A clone is not on an index, and the command works in any folder."""
    assert install_command("distributed", tmp_path) == "pip install 'skipjoin[distributed]'"
    clone = Path(__file__).parents[1]
    assert install_command("distributed") == f"pip install -c '{clone}/constraints.txt' -e '{clone}[distributed]'"
    assert (clone / "constraints.txt").is_file()
