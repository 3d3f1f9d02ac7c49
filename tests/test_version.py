from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest

from skipjoin import version
from skipjoin.version import install_command


class Installed:
    def __init__(self, url: str) -> None:
        self.record = json.dumps({"url": url})

    def read_text(self, name: str) -> str | None:
        return self.record if name == "direct_url.json" else None


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Return a function that gives the command of an installation from a URL, outside of a checkout."""

    def of(url: str, *extras: str) -> str:
        monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed(url))
        return install_command(*extras, source=tmp_path / "site-packages")

    return of


def test_install_command_in_a_checkout_names_its_folder_and_constraints() -> None:
    """The command works in any folder."""
    clone = Path(__file__).parents[1]
    assert install_command("distributed") == f"pip install -c '{clone}/constraints.txt' -e '{clone}[distributed]'"
    assert install_command("bench", "plot").endswith(f"-e '{clone}[bench,plot]'")
    assert (clone / "constraints.txt").is_file()


def test_install_command_names_the_checkout_or_wheel_that_was_installed(command: object, tmp_path: Path) -> None:
    assert callable(command)
    folder = tmp_path / "a clone"
    folder.mkdir()
    assert command(folder.as_uri(), "plot") == f"pip install -c '{folder}/constraints.txt' '{folder}[plot]'"
    wheel = tmp_path / "skipjoin-0.1.0-py3-none-any.whl"
    wheel.touch()
    assert command(wheel.as_uri(), "plot", "otel") == f"pip install '{wheel}[plot,otel]'"


def test_install_command_without_its_source_names_the_packages(
    command: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        "torch>=2.11",
        'alembic>=1.14; extra == "batches"',
        'skipjoin[batches]; extra == "postgres"',
        'asyncpg>=0.30; extra == "postgres"',
        'vllm<0.34; sys_platform == "linux" and extra == "vllm"',
    ]
    monkeypatch.setattr(version.importlib.metadata, "requires", lambda name: lines)
    assert callable(command)
    for url in ("file:///nowhere/skipjoin-0.1.0.whl", "https://example.org/skipjoin-0.1.0.whl"):
        assert command(url, "postgres") == "pip install 'alembic>=1.14' 'asyncpg>=0.30'"
    assert command("file:///nowhere", "vllm") == "pip install 'vllm<0.34'"
