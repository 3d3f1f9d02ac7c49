from __future__ import annotations

import pytest
from server_worlds import ServerProcess
from typer.testing import CliRunner, Result

from skipjoin.cli import app
from skipjoin.cli.chat import printable


def chat(url: str, *lines: str) -> Result:
    command = ["chat", "--url", url, "--max-tokens", "5", "--system", "x"]
    return CliRunner().invoke(app, command, input="\n".join(lines))


def test_lines_are_answered_repeated_and_explained(server: ServerProcess) -> None:
    shown = chat(server.url, "abc", "", "/again", "/why", "/quit", "never sent")
    assert shown.exit_code == 0, shown.output
    first, again, *explained = shown.stdout.splitlines()
    assert first
    assert again == first
    report = "\n".join(explained)
    assert "ended (length)" in report
    assert "5 of at most 5 output tokens" in report
    server.wait_idle()


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (["/nonsense"], "there is no command /nonsense"),
        (["/again"], "there is no answer yet"),
        (["abc", "/reset", "/again"], "there is no answer yet"),
        (["a" * 5000], "must have at most"),
    ],
)
def test_failed_line_is_named_and_the_exit_code_says_so(server: ServerProcess, lines: list[str], error: str) -> None:
    shown = chat(server.url, *lines, "/system", "abc")
    assert (shown.exit_code, error in shown.stderr) == (1, True), shown.output
    assert shown.stdout.splitlines()[-1]  # the next message is answered
    server.wait_idle()


@pytest.mark.parametrize("lines", [["abc"], [], ["/quit"]])
def test_missing_server_is_one_line(lines: list[str]) -> None:
    shown = chat("http://127.0.0.1:9", *lines)
    assert (shown.exit_code, shown.stdout, shown.stderr.count("\n")) == (1, "", 1)
    assert "cannot be reached" in shown.stderr
    assert "--url" in shown.stderr


def test_text_of_a_model_cannot_control_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\tc\nd\x9b") == "a[2Jb\tc\nd"
