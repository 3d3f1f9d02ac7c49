from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import openai
import pytest
from batch_client import CHAT, COMPLETIONS, answers, ids, line, submit, upload, wait_for
from rich.console import Console
from server_worlds import ServerProcess
from typer.testing import CliRunner

from skipjoin.cli import app
from skipjoin.cli.batch_watch import Watch
from support.waiting import wait_until

LINES = 60
# Requests that keep the engine busy for longer than a test takes.
ENDLESS = {"prompt": "1", "max_tokens": 400, "ignore_eos": True}
PAGE = Path(__file__).parents[2] / "docs" / "batches.md"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("batches")
    found = ServerProcess(["model", "tally", f"batch_dir={folder}", "api_keys=first+second", "batch_inflight=16"])
    yield found
    found.stop()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="first", max_retries=0) as found:
        yield found


@pytest.fixture
def other(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="second", max_retries=0) as found:
        yield found


def test_lines_have_the_format_of_their_endpoint(client: openai.OpenAI) -> None:
    asked = {"temperature": 0, "model": "tally"}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/responses": {"input": "Spell apple"},
        "/v1/messages": {"messages": [{"role": "user", "content": "Spell apple"}]},
    }
    for path, body in bodies.items():
        done = wait_for(client, submit(client, [line("a", path, **asked, **body)], path))
        (found,) = answers(client, done.output_file_id)
        expected = client.post(path.removeprefix("/v1"), body=asked | body, cast_to=dict[str, Any])
        (answer,), (same,) = (body.get("output", body.get("content")) for body in (found["response"]["body"], expected))
        assert answer.get("text", answer.get("content")) == same.get("text", same.get("content"))


def test_batch_answers_match_direct_requests(client: openai.OpenAI) -> None:
    """Lines that the endpoint rejects are in the error file with its response."""
    prefix = "Count well. " * 8
    chats = {f"id {n}": [{"role": "user", "content": f"{prefix}Count from {n} to {n + 3}"}] for n in range(LINES)}
    asked = {"temperature": 0, "max_tokens": 24}
    lines = [line(name, CHAT, model="tally", messages=messages, **asked) for name, messages in chats.items()]
    lines.append(line("bad", CHAT, messages=[], **asked))
    done = wait_for(client, submit(client, lines, CHAT, metadata={"run": "1"}))
    assert done.status == "completed", done
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (61, LINES, 1)
    assert done.metadata == {"run": "1"}
    assert done.model == "tally"
    found = answers(client, done.output_file_id)
    assert ids(found) == list(chats)
    generated = cached = 0
    for answer in found:
        direct = client.chat.completions.create(model="tally", messages=chats[answer["custom_id"]], **asked)  # type: ignore[call-overload]
        assert answer["response"]["status_code"] == 200
        assert answer["error"] is None
        body = answer["response"]["body"]
        assert body["choices"][0]["message"]["content"] == direct.choices[0].message.content
        generated += body["usage"]["completion_tokens"]
        cached += body["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert done.usage.output_tokens == generated
    assert done.usage.input_tokens_details.cached_tokens == cached > 0
    ((refused),) = answers(client, done.error_file_id)
    assert refused["custom_id"] == "bad"
    assert refused["response"]["status_code"] == 400
    assert refused["response"]["body"]["error"]["param"] == "messages"
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at  # type: ignore[operator]
    assert client.files.retrieve(done.output_file_id).purpose == "batch_output"  # type: ignore[arg-type]


def test_lines_may_have_constraints_and_tools(client: openai.OpenAI) -> None:
    """A constraint that cannot be enforced refuses its line alone."""
    colors = {"type": "object", "properties": {"color": {"enum": ["red", "green"]}}, "required": ["color"]}
    pick = {"type": "function", "function": {"name": "pick", "parameters": colors}}
    asked = {"messages": [{"role": "user", "content": "Pick a color"}], "temperature": 0, "max_tokens": 90}
    bodies = {
        "call": {"tools": [pick], "tool_choice": "required", "parallel_tool_calls": False},
        "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": colors}}},
        "bad": {
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"const": 1}}}}
        },
    }
    done = wait_for(client, submit(client, [line(name, CHAT, **asked, **body) for name, body in bodies.items()], CHAT))
    call, schema = (answer["response"]["body"]["choices"][0] for answer in answers(client, done.output_file_id))
    assert call["finish_reason"] == "tool_calls"
    (made,) = call["message"]["tool_calls"]
    assert json.loads(made["function"]["arguments"])["color"] in ("red", "green")
    direct = client.chat.completions.create(model="tally", **asked, **bodies["call"]).choices[0].message  # type: ignore[call-overload]
    assert direct.tool_calls[0].function.arguments == made["function"]["arguments"]
    assert json.loads(schema["message"]["content"])["color"] in ("red", "green")
    ((refused),) = answers(client, done.error_file_id)
    assert refused["response"]["status_code"] == 400
    assert '"not"' in refused["response"]["body"]["error"]["message"]


def test_line_without_seed_gets_its_own(client: openai.OpenAI) -> None:
    """A rerun then repeats its tokens. The choices of a line differ."""
    asked = {"prompt": "1 2 3", "temperature": 2.0, "max_tokens": 60, "ignore_eos": True}
    lines = [line("a", **asked, n=4), line("b", **asked), line("c", **asked, seed=7), line("d", **asked, seed=7)]
    done = wait_for(client, submit(client, lines))
    texts = {
        answer["custom_id"]: [choice["text"] for choice in answer["response"]["body"]["choices"]]
        for answer in answers(client, done.output_file_id)
    }
    assert texts["c"] == texts["d"]
    assert len({*texts["a"], *texts["b"]}) == 5


def test_expired_batch_reports_every_line(client: openai.OpenAI, server: ServerProcess) -> None:
    """Lines answered in time are in the output file, all others in the error file with OpenAI's error."""
    lines = [line("short", prompt="1", max_tokens=2), *(line(str(n), **ENDLESS) for n in range(300))]
    done = wait_for(client, submit(client, lines, window="3s"))
    assert done.status == "expired"
    assert done.expired_at is not None
    assert 3 <= done.expired_at - done.created_at <= 8
    good, late = answers(client, done.output_file_id), answers(client, done.error_file_id)
    assert "short" in ids(good)
    assert late
    assert sorted(ids(good + late)) == sorted(["short", *map(str, range(300))])
    assert all(
        batch["response"] is None
        and batch["error"]
        == {
            "code": "batch_expired",
            "message": "This request could not be executed before the completion window expired.",
        }
        for batch in late
    )
    wait_until_idle(server)


def test_cancel_stops_batch_and_its_generation(client: openai.OpenAI, server: ServerProcess) -> None:
    batch = submit(client, [line(str(n), **ENDLESS) for n in range(200)])
    wait_for(client, batch, "in_progress")
    while not load(server)["running"]:
        time.sleep(0.02)
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = wait_for(client, batch)
    assert done.status == "cancelled"
    assert {answer["error"]["code"] for answer in answers(client, done.error_file_id)} == {"batch_cancelled"}
    assert len(answers(client, done.output_file_id)) + len(answers(client, done.error_file_id)) == 200
    assert client.batches.cancel(batch.id).status == "cancelled"  # a second cancel changes nothing
    wait_until_idle(server)


def load(server: ServerProcess) -> dict[str, float]:
    return httpx.get(f"{server.url}/load", headers={"authorization": "Bearer first"}).json()


def wait_until_idle(server: ServerProcess) -> None:
    wait_until(lambda: not any(load(server)[name] for name in ("running", "waiting", "kv_cache_usage")))


@pytest.mark.parametrize(
    ("lines", "number", "message"),
    [
        ([line(str(n), prompt="x") for n in range(6)] + [b'{"custom_id": "7"'], 7, "JSON"),
        ([line("a", prompt="x"), line("b", prompt="x"), line("a", prompt="x")], 3, "custom_id"),
        ([line("a", CHAT, messages=[])], 1, "url"),
        ([line("a", prompt="x"), line("b", prompt="x", stream=True)], 2, "stream"),
        ([line("a", prompt="x", model="gpt-9")], 1, "gpt-9"),
    ],
)
def test_invalid_input_file_fails_batch(client: openai.OpenAI, lines: list[bytes], number: int, message: str) -> None:
    done = wait_for(client, submit(client, lines))
    assert done.status == "failed"
    assert done.failed_at is not None
    (error,) = done.errors.data or []
    assert error.line == number
    assert message in (error.message or "")
    assert done.output_file_id is None


def test_batches_and_files_are_hidden_from_other_keys(client: openai.OpenAI, other: openai.OpenAI) -> None:
    file_id = upload(client, [line("a", prompt="1", max_tokens=2)])
    batch = client.batches.create(input_file_id=file_id, endpoint=COMPLETIONS, completion_window="24h")
    done = wait_for(client, batch)
    assert done.output_file_id is not None
    assert not {done.id} & {batch.id for batch in other.batches.list()}
    assert not {file_id, done.output_file_id} & {file.id for file in other.files.list()}
    for foreign in (
        lambda: other.batches.retrieve(done.id),
        lambda: other.batches.cancel(done.id),
        lambda: other.batches.list(after=done.id),
        lambda: other.batches.create(input_file_id=file_id, endpoint=COMPLETIONS, completion_window="24h"),
        lambda: other.files.retrieve(file_id),
        lambda: other.files.content(done.output_file_id or ""),
        lambda: other.files.delete(done.output_file_id or ""),
    ):
        with pytest.raises(openai.NotFoundError):
            foreign()


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"completion_window": "1w"}, 400, "completion_window"),
        ({"completion_window": "0s"}, 400, "completion_window"),
        ({"completion_window": "169h"}, 400, "completion_window"),
        ({"endpoint": "/v1/images/generations"}, 400, "endpoint"),
        ({"input_file_id": "file-none"}, 404, "input_file_id"),
        ({"input_file_id": "../../etc/passwd"}, 404, "input_file_id"),
        ({"metadata": {str(n): "" for n in range(17)}}, 400, "metadata"),
        ({"metadata": {"k": "v" * 513}}, 400, "metadata.k"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, 400, "output_expires_after.seconds"),
        ({"priority": 1}, 400, "priority"),
    ],
)
def test_invalid_batch_request_is_rejected(
    server: ServerProcess, client: openai.OpenAI, body: dict, status: int, param: str
) -> None:
    good = {"endpoint": COMPLETIONS, "completion_window": "24h"}
    if "input_file_id" not in body:
        good["input_file_id"] = upload(client, [line("a", prompt="1")])
    answer = httpx.post(f"{server.url}/v1/batches", json=good | body, headers={"authorization": "Bearer first"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


def test_pagination_and_idempotency_keys(client: openai.OpenAI) -> None:
    file_id = upload(client, [line("a", prompt="1", max_tokens=1)])
    asked = {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    made = [client.batches.create(**asked, extra_headers={"Idempotency-Key": key}) for key in "abca"]  # type: ignore[arg-type]
    assert made[3].id == made[0].id
    first = client.batches.list(limit=2)
    assert [batch.id for batch in first.data] == [made[2].id, made[1].id]
    assert first.has_more
    assert client.batches.list(limit=2, after=made[1].id).data[0].id == made[0].id
    for batch in made[:3]:
        wait_for(client, batch)
    client.files.delete(file_id)
    with pytest.raises(openai.NotFoundError):
        client.batches.create(**asked)  # type: ignore[arg-type]
    output = client.batches.retrieve(made[0].id).output_file_id
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.batches.create(**asked | {"input_file_id": output})  # type: ignore[arg-type]


def test_reused_idempotency_key_is_rejected(client: openai.OpenAI) -> None:
    """A key may be reused only with the same body; a change in any field is an error and creates no batch."""
    first, second = (upload(client, [line("a", prompt="1", max_tokens=1)]) for _ in range(2))
    asked = {"input_file_id": first, "endpoint": COMPLETIONS, "completion_window": "24h", "metadata": {"a": "b"}}
    again = {"extra_headers": {"Idempotency-Key": "used twice"}}
    made = client.batches.create(**asked, **again)  # type: ignore[arg-type]
    for name, value in {
        "input_file_id": second,
        "endpoint": CHAT,
        "completion_window": "23h",
        "metadata": {"a": "c"},
        "output_expires_after": {"anchor": "created_at", "seconds": 3600},
    }.items():
        with pytest.raises(openai.BadRequestError, match=f"used for {made.id}, which has another {name};") as caught:
            client.batches.create(**asked | {name: value}, **again)  # type: ignore[arg-type]
        assert caught.value.code == "idempotency_key_reused"
    assert client.batches.create(**asked, **again).id == made.id  # type: ignore[arg-type]
    assert client.batches.list(limit=1).data[0].id == made.id
    wait_for(client, made)


def test_documented_example_runs(server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the Python example of `docs/batches.md` on its file of requests."""
    page = PAGE.read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    here = code.replace("http://127.0.0.1:8000", server.url).replace('"none"', '"first"')
    (tmp_path / "requests.jsonl").write_text("\n".join(re.findall(r'^\{"custom_id".*', page, re.MULTILINE)))
    monkeypatch.chdir(tmp_path)
    shown = StringIO()
    with redirect_stdout(shown):
        exec(compile(here, PAGE.name, "exec"), {})
    assert shown.getvalue() == "a 3, 4, 5, 6, 7\nb a-p-p-l-e\n"


def test_batch_command(server: ServerProcess, tmp_path: Path) -> None:
    target = ["--url", server.url, "--api-key", "first"]
    requests, output = tmp_path / "requests.jsonl", tmp_path / "output.jsonl"
    requests.write_bytes(b"\n".join([b"", *(line(str(n), prompt="1", max_tokens=2) for n in range(3))]))
    run = CliRunner().invoke(app, ["batch", "submit", str(requests), "--watch", *target])
    assert run.exit_code == 0, run.output
    batch_id = run.stdout.split()[0]
    assert f"{batch_id} completed: 3 of 3 lines done, 0 failed" in run.stdout
    run = CliRunner().invoke(app, ["batch", "fetch", batch_id, "-o", str(output), *target])
    assert run.exit_code == 0, run.output
    assert [json.loads(text)["custom_id"] for text in output.read_text().splitlines()] == ["0", "1", "2"]
    run = CliRunner().invoke(app, ["batch", "fetch", batch_id, "--errors", *target])
    assert (run.exit_code, run.stderr) == (2, f"error: {batch_id} has status completed and no error file\n")
    assert batch_id in CliRunner().invoke(app, ["batch", "list", *target]).stdout
    assert "completed" in CliRunner().invoke(app, ["batch", "cancel", batch_id, *target]).stdout
    requests.write_bytes(b"no")
    run = CliRunner().invoke(app, ["batch", "submit", str(requests), "--endpoint", COMPLETIONS, "--watch", *target])
    assert run.exit_code == 1
    assert "  line 1: it is not valid JSON" in run.stdout
    for arguments, message, code in (
        (["watch", "batch_none", *target], "there is no batch 'batch_none' (HTTP status 404)", 1),
        (["list", "--url", server.url], "'x-api-key: KEY'; here --api-key or OPENAI_API_KEY gives it", 1),
        (["list", "--url", "http://127.0.0.1:9"], "cannot be reached: connection refused", 1),
        (["submit", str(tmp_path / "none"), *target], "No such file", 2),
    ):
        run = CliRunner().invoke(app, ["batch", *arguments])
        assert (run.exit_code, message in run.stderr) == (code, True), run.stderr


def test_watch_output_fits_80_columns() -> None:
    console = Console(file=StringIO(), width=80, force_terminal=True)
    counts = {"total": 50_000, "completed": 12_345, "failed": 67}
    with Watch(console) as watch:
        watch._show({"status": "in_progress", "request_counts": counts, "expires_at": time.time() + 86_000})
    shown = console.file.getvalue()
    assert "in_progress" in shown
    assert "12412 of 50000 lines, 67 failed, 0 tokens/s, the window ends in 23:53:" in " ".join(shown.split())


def test_watch_prints_lines_where_there_is_no_terminal() -> None:
    console = Console(file=StringIO())
    batch = {"request_counts": {"total": 9, "completed": 4, "failed": 0}, "expires_at": time.time() + 86_000}
    with Watch(console) as watch:
        for status in ("validating", "in_progress", "in_progress", "completed"):
            watch._show(batch | {"status": status})
    first, second, last = console.file.getvalue().splitlines()
    assert first == "validating: 4 of 9 lines, 0 failed"
    assert second.startswith("in_progress: 4 of 9 lines, 0 failed, 0 tokens/s, the window ends in 23:53:")
    assert last == "completed: 4 of 9 lines, 0 failed"


def test_watch_survives_server_restart() -> None:
    batch = {"id": "batch_1", "expires_at": 2e9, "request_counts": {"total": 1, "completed": 1, "failed": 0}}
    replies = [(200, "in_progress"), (503, ""), (200, "completed")]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, state = replies.pop(0)
            body = json.dumps(batch | {"status": state}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}"
        run = CliRunner().invoke(app, ["batch", "watch", "batch_1", "--url", url])
        server.shutdown()
    assert run.exit_code == 0, run.output
    assert "batch_1 completed" in run.stdout
