from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.console import Console
from rich.progress import BarColumn
from typer.testing import CliRunner

from skipjoin.builtin import builtin_model_path
from skipjoin.cli import app
from skipjoin.cli.progress import Bars
from skipjoin.version import VERSION
from support.commands import Outcome, outcomes_with
from support.gguf_files import Kind, small_llama, write_model

FOLDER = Path(builtin_model_path())


def run(*arguments: object, **environment: str):
    return CliRunner().invoke(app, list(map(str, arguments)), env=environment)


def test_check_accepts_valid_settings_and_names_each_error(tmp_path: Path) -> None:
    done = run("serve", "tally", "--port", 0, "--check")
    assert done.exit_code == 0, done.output
    assert "The settings are valid: tally with recipe adaptive at http://127.0.0.1:" in done.stdout
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        cases = {
            f"error: --port {port} on 127.0.0.1 is in use": ("tally", "--port", port),
            "is not a folder": (tmp_path / "none", "--port", 0),
            "set --api-key-file": ("tally", "--host", "0.0.0.0", "--port", 0),
            "--ssl-keyfile is for TLS: set --ssl-certfile": ("tally", "--ssl-keyfile", tmp_path / "key"),
            "cannot be used for TLS": ("tally", "--ssl-certfile", tmp_path / "none.pem", "--port", 0),
            "--kv-cache-gib must be at most": ("tally", "--kv-cache-gib", 400_000, "--port", 0),
            "--swap-space must be at most": ("tally", "--swap-space", 400_000, "--port", 0),
            "is too small for one request": ("tally", "--kv-cache-gib", 1e-4, "--port", 0),
            "--max-model-len must be at most the model's 1024": ("tally", "--max-model-len", 9999, "--port", 0),
            "must divide the model's 4 attention heads": ("tally", "-tp", 3, "--port", 0),
            "files and batches cannot be kept": ("tally", "--batch-dir", "/proc/batches", "--port", 0),
            "attention triton needs device cuda": ("tally", "--device", "cpu", "--attention", "triton", "--port", 0),
        }
        for message, arguments in cases.items():
            done = run("serve", *arguments, "--check")
            assert done.exit_code == 2, message
            assert message in done.stderr


@pytest.mark.usefixtures("log_of_process")
def test_wrong_models_are_refused_by_each_command(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    for arguments, message in (
        (("convert", file, tmp_path / "new"), "is a GGUF model, which needs no conversion"),
        (("convert", tmp_path, tmp_path / "new"), "is a GGUF model, which needs no conversion"),
        (("generate", tmp_path / "typo", "--prompt", "x"), "typo is not a folder"),
        (("serve", tmp_path / "typo", "--port", 0), "typo is not a folder"),
        (("serve", tmp_path, "--port", 0), "model.gguf is cut off in its header, at byte 4"),
        (("pull", file), "model.gguf is cut off in its header, at byte 4"),
    ):
        done = run(*arguments)
        assert (done.exit_code, message in done.stderr) == (2, True), (arguments, done.stderr)


def test_env_describes_the_installation_without_values_of_variables() -> None:
    done = run("env", SKIPJOIN_API_KEY="secret-key")
    assert done.exit_code == 0, done.output
    assert f"skipjoin               {VERSION}" in done.stdout
    assert "SKIPJOIN_API_KEY" in done.stdout
    assert "secret-key" not in done.stdout
    assert "CPU operations" in done.stdout


def test_shell_completes_options() -> None:
    words = {"COMP_WORDS": "skipjoin serve --rec", "COMP_CWORD": "2", "_SKIPJOIN_COMPLETE": "complete_bash"}
    done = CliRunner().invoke(app, [], prog_name="skipjoin", env=words)
    assert "--recipe" in done.stdout.split()


COMMIT = "0" * 40


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a hub with the built-in model as org/tally, and GGUF files as org/small; yield its URL."""
    files = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.is_file()}
    small = {path.name: path.read_bytes() for path in made_gguf_files(tmp_path_factory.mktemp("small"))}
    repositories = {"org/tally": files, "org/small": {**small, "README.md": b"small"}}

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2]
            found = next(
                (repository for repository in repositories if f"/{repository}/" in f"{self.path.partition('?')[0]}/"),
                "",
            )
            files = repositories.get(found, {})
            if self.path.startswith("/api/models/org/") and files:
                siblings = [{"rfilename": file} for file in files]
                info = {"_id": "1", "id": found, "modelId": found, "sha": COMMIT, "siblings": siblings}
                tree = [{"type": "file", "path": file, "oid": COMMIT, "size": len(files[file])} for file in files]
                self._send(200, json.dumps(tree if "/tree/" in self.path else info).encode(), "application/json")
            elif "/resolve/" in self.path and name in files:
                self._send(200, files[name], "application/octet-stream")
            else:
                self._send(404, b"{}", "application/json")

        def do_HEAD(self) -> None:
            self.do_GET()

        def _send(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{len(body):040d}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def made_gguf_files(folder: Path) -> list[Path]:
    model = small_llama(hidden_size=64)
    write_model(folder / "small.Q8_0.gguf", model, Kind.Q8_0)
    write_model(folder / "small-Q4_0.gguf", model, Kind.Q4_0, tensors_per_part=6)
    write_model(folder / "mmproj-F16.gguf", model, Kind.F16)
    return sorted(folder.iterdir())


class Pulls(NamedTuple):
    """What commands print, by their arguments: with the hub at first, then without it."""

    home: Path
    online: dict[str, Outcome]
    offline: dict[str, Outcome]


@pytest.fixture(scope="module")
def pulls(hub: str, tmp_path_factory: pytest.TempPathFactory) -> Pulls:
    home = tmp_path_factory.mktemp("home")
    environment = {"HF_HOME": str(home), "HF_ENDPOINT": hub, "HF_HUB_DISABLE_XET": "1"}
    tags = [f"pull org/small{tag}" for tag in (":q8_0", ":Q4_0", ":Q2_K", "")]
    online = outputs_of(["list", "pull org/tally", "pull org/other", *tags], environment)
    broken = home / "hub/models--org--broken/snapshots" / COMMIT
    broken.mkdir(parents=True)
    (broken / "config.json").write_text('{"model_type": "mystery"}')
    (broken.parents[1] / "refs").mkdir()
    served = [f"serve {name} --port 0 --check" for name in ("org/tally", "org/small:Q4_0")]
    return Pulls(home, online, outputs_of(["list", *served], {**environment, "HF_HUB_OFFLINE": "1"}))


def outputs_of(commands: list[str], environment: dict[str, str]) -> dict[str, Outcome]:
    found = outcomes_with([command.split() for command in commands], environment)
    return dict(zip(commands, found, strict=True))


def test_one_gguf_file_of_many_is_pulled_and_served_without_the_hub(pulls: Pulls) -> None:
    whole, parts = (pulls.online[f"pull org/small:{tag}"] for tag in ("q8_0", "Q4_0"))
    assert (whole.code, parts.code) == (0, 0), whole.stderr + parts.stderr
    assert whole.stdout.startswith("org/small:q8_0: LlamaForCausalLM, context 128 tokens, in ")
    missing, bare = (pulls.online[f"pull org/small{tag}"].stderr for tag in (":Q2_K", ""))
    assert "org/small has no GGUF file of Q2_K: it has Q4_0, Q8_0" in missing
    assert "org/small has GGUF files: choose one with org/small:Q4_0 or org/small:Q8_0" in bare
    snapshot = pulls.home / "hub/models--org--small/snapshots" / COMMIT
    assert sorted(file.name for file in snapshot.iterdir()) == [
        "small-Q4_0-00001-of-00002.gguf", "small-Q4_0-00002-of-00002.gguf", "small.Q8_0.gguf",
    ]  # fmt: skip
    for tag in ("Q4_0", "Q8_0"):
        assert is_listed(f"org/small:{tag}", pulls)
    served = pulls.offline["serve org/small:Q4_0 --port 0 --check"]
    assert served.code == 0, served.stderr


def test_pulled_model_is_listed_and_served_without_the_hub(pulls: Pulls) -> None:
    assert "org/" not in pulls.online["list"].stdout
    done, missing = (pulls.online[f"pull org/{name}"] for name in ("tally", "other"))
    assert missing.code == 2
    assert "org/other is neither a folder nor a model that can be fetched" in missing.stderr
    assert done.code == 0, done.stderr
    assert done.stdout.startswith("org/tally: ")
    assert is_listed("org/tally", pulls)
    served = pulls.offline["serve org/tally --port 0 --check"]
    assert served.code == 0, served.stderr


def is_listed(model: str, pulls: Pulls) -> bool:
    return "yes" in next(line for line in pulls.offline["list"].stdout.splitlines() if model in line)


def test_lines_have_each_task_and_come_no_more_often_than_asked() -> None:
    lines = ["runs: 0 of 4, now: 0 %", "runs: 1 of 4, now: 0 %", "runs: 1 of 4, now: 50 %"]
    for every_s, expected in ((0.0, lines), (60.0, [])):
        console = Console(file=StringIO())
        with Bars(BarColumn(), console=console, every_s=every_s) as bars:
            runs, now = bars.add_task("runs", total=None), bars.add_task("now", total=100)
            bars.update(runs, total=4)
            bars.update(runs, completed=1)
            bars.update(now, completed=50)
        assert console.file.getvalue().splitlines() == expected


def test_terminal_has_bars_and_no_lines() -> None:
    console = Console(file=StringIO(), force_terminal=True)
    with Bars("{task.description}", console=console, every_s=0.0) as bars:
        bars.update(bars.add_task("work", total=2), completed=1)
    assert "work:" not in console.file.getvalue()


PREPARED = "import os, sys; from skipjoin.__main__ import _prepare_streams as prepare; prepare(); "


def test_closed_standard_streams_lead_nowhere() -> None:
    """Otherwise the first sockets and files of a server would be its standard streams."""
    program = f"{PREPARED} print('text'); sys.stderr.isatty(); sys.stdin.read(); sys.exit(os.open(os.devnull, 0) - 2)"
    done = subprocess.run([sys.executable, "-c", program], preexec_fn=lambda: os.closerange(0, 3), check=False)
    assert done.returncode == 1


def test_characters_beyond_the_encoding_of_a_terminal_are_replaced() -> None:
    command = [sys.executable, "-c", f"{PREPARED} print('KV \u2588', ascii(input()))"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environment, input=b"\xff\n", stdout=subprocess.PIPE, check=True)
    assert done.stdout == rb"KV ? '\ufffd'" + b"\n"


@pytest.mark.parametrize(
    ("is_full", "error"), [(True, "error: the output cannot be written: No space left on device\n"), (False, "")]
)
def test_output_of_a_command_that_cannot_be_written_is_no_traceback(is_full: bool, error: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed, Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "skipjoin", "--version"]
        output = full if is_full else closed
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, error)
