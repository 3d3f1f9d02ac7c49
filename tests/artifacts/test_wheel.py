from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from test_extras import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
WHEELS = sorted((ROOT / "dist").glob(f"skipjoin-*_{platform.machine()}.whl"))
pytestmark = [
    pytest.mark.artifacts,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not WHEELS, reason="needs a wheel in dist: make release"),
]


def installed(folder: Path, extras: str = "") -> Path:
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, f"{WHEELS[-1]}{extras}"], check=True, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("serving"), "[serve]")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in ("LANG", "LD_LIBRARY_PATH")}
    return kept | {"PATH": str(tmp_path), "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.fixture
def server(serving: Path, environment: dict[str, str], tmp_path: Path) -> Iterator[tuple[str, Path]]:
    log = tmp_path / "log"
    command = [str(serving / "bin/skipjoin"), "serve", "tally", "--port", "0", "--profile", "off"]
    with (
        log.open("w") as file,
        subprocess.Popen(
            command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=file, text=True
        ) as process,
    ):
        try:
            ready = process.stdout.readline()
            assert ready.startswith("Ready"), log.read_text()
            yield ready.split(" at ")[1].split()[0], log
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_server_answers_with_the_compiled_operations_of_the_wheel(server: tuple[str, Path], tmp_path: Path) -> None:
    url, log = server
    body = {"messages": [{"role": "user", "content": "Count from 3 to 7"}], "temperature": 0, "max_tokens": 40}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert "3, 4, 5, 6, 7" in json.load(answer)["choices"][0]["message"]["content"]
    assert re.search(r"CPU operations: (?!torch)\S+", log.read_text()), log.read_text()
    assert not list((tmp_path / "cache").rglob("ops-*.so")), "operations were compiled"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{url}/v1/batches", timeout=60)
    assert f"{WHEELS[-1]}[batches]" in refused.value.read().decode()


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_work_in_the_base_installation_or_name_the_wheel_with_an_extra(
    bare: Path, environment: dict[str, str], tmp_path: Path, name: str
) -> None:
    arguments, needed = COMMANDS[name]
    command = [bare / "bin/skipjoin", *name.split(), *arguments.format(folder=tmp_path).split()]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert not needed or done.stderr.endswith(f"pip install '{WHEELS[-1]}[{','.join(needed)}]'\n"), done.stderr


@pytest.mark.parametrize(
    "command",
    ["generate tally --prompt a --max-tokens 2", "profile --seconds 1 --out profile.json", "list", "env"],
    ids=lambda command: command.split()[0],
)
def test_commands_that_need_the_server_work_with_it(
    serving: Path, environment: dict[str, str], tmp_path: Path, command: str
) -> None:
    done = subprocess.run(
        [serving / "bin/skipjoin", *command.split()],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_library_that_this_processor_supports_passes_its_self_test(
    serving: Path, environment: dict[str, str]
) -> None:
    code = """
import ctypes, torch
from skipjoin.model import backends
from skipjoin.model.ops import build
for file in build.shipped():
    library = ctypes.CDLL(str(file))
    passes = all(backends._passes(library, dtype) for dtype in (torch.float32, torch.bfloat16))
    print(file.name, build.path_of(library), passes)
"""
    done = subprocess.run(
        [str(serving / "bin/python"), "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines, done.stderr
    assert all(name == f"ops-{path}.so" and passes == "True" for name, path, passes in lines), done.stdout


def test_base_installation_has_no_packages_of_extras(bare: Path) -> None:
    listed = subprocess.run(
        [str(bare / "bin/python"), "-m", "pip", "list", "--format", "json"], capture_output=True, check=True
    )
    names = {package["name"].lower() for package in json.loads(listed.stdout)}
    assert not names & {"torch", "transformers", "fastapi", "aiohttp", "alembic", "matplotlib", "ray", "usearch"}


def test_checksums_are_right() -> None:
    done = subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=ROOT / "dist", capture_output=True, check=False)
    assert done.returncode == 0, done.stdout.decode()
