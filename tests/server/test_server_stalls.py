from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import server_worlds
import tiny_model as tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from server_worlds import JSON, Api, MakeApi, StartServer

from skipjoin.chat import Conversations
from skipjoin.engine.text import Output
from skipjoin.model.tokenizer import load_tokenizer
from skipjoin.sampling import TokenDetail, TokenLogprob
from skipjoin.server.engines.sequences import MAX_OF_SEQUENCE, MAX_WAITING, OutputQueue
from support.pace import STALL_S, slowness

pytestmark = pytest.mark.anyio
LARGEST = 4 << 20
MEMORY = 128 << 20


class Loop:
    """Measures how long the event loop was blocked.

    Each time is the smaller of elapsed time and CPU time, so that other processes do not count.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def __aenter__(self) -> Loop:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0.002)
        self._task.cancel()

    async def _watch(self) -> None:
        while True:
            begin, used = time.perf_counter(), time.process_time()
            await asyncio.sleep(0.001)
            self.longest_s = max(self.longest_s, min(time.perf_counter() - begin, time.process_time() - used))


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Exclude existing objects from garbage collection, as a server does."""
    gc.collect()
    gc.freeze()


async def stall_of(work: Callable[[], Awaitable[Any]], tries: int = 5) -> float:
    """Return the stall by some work, scaled to an idle machine. The minimum of up to `tries` measurements counts."""
    stalls: list[float] = []
    while len(stalls) < tries and min(stalls, default=STALL_S) >= STALL_S:
        gc.freeze()  # Skip the application and objects of earlier tries.
        before = slowness()
        async with Loop() as loop:
            await work()
        stalls.append(loop.longest_s / max(before, slowness()))
    return min(stalls)


def peak_memory() -> int:
    """Return the peak memory of this process since the last call in bytes."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def filled(begin: str, unit: str, end: str, size: int = LARGEST) -> bytes:
    return (begin + unit * ((size - len(begin) - len(end)) // len(unit.encode())) + end).encode()


def fields(count: int = 380_000) -> str:
    return ",".join(f'"{number}":1' for number in range(count))


CHAT = '{"messages":[{"role":"user","content":'
TOOLS = CHAT + '"x"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"a":['
CALL = '{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}'
INPUT = '{"messages":[{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"f","input":{"a":['
CALLS = '{"messages":[{"role":"assistant","tool_calls":['
# The path, a function that makes the body, and the status.
BODIES: dict[str, tuple[str, Callable[[], bytes], int]] = {
    "text": ("/v1/completions", lambda: filled('{"prompt":"', "ab ", '"}'), 400),
    "conversation": ("/v1/chat/completions", lambda: filled(CHAT + '"', "😀", '"}]}'), 400),
    "wrong metadata": ("/v1/completions", lambda: bytes('{"prompt":"a","metadata":{' + fields() + "}}", "utf-8"), 400),
    "unknown fields": ("/v1/completions", lambda: bytes('{"prompt":"a",' + fields() + "}", "utf-8"), 400),
    "unknown within": ("/v1/chat/completions", lambda: bytes(CHAT + '"x",' + fields() + "}]}", "utf-8"), 400),
    "parts": ("/v1/chat/completions", lambda: filled(CHAT + "[", '{"type":"text","text":""},', "{}]}]}"), 400),
    "tools": ("/v1/chat/completions", lambda: filled(TOOLS, "[],", "0]}}}]}", 1 << 19), 400),
    "calls": ("/v1/chat/completions", lambda: filled(CALLS, CALL + ",", CALL + "]}]}"), 400),
    "items": ("/v1/responses", lambda: filled('{"input":[', '{"role":""},', "0]}"), 400),
    "empty items": ("/v1/responses", lambda: filled('{"input":[', "{},", "0]}"), 400),
    "text of items": ("/v1/responses", lambda: filled('{"input":[{"role":"user","content":"', "ab ", '"}]}'), 400),
    "blocks": ("/v1/messages", lambda: filled('{"messages":[{"role":"user","content":[', '{"type":""},', "0]}]}"), 400),
    "inputs": ("/v1/messages", lambda: filled(INPUT, "[],", "0]}}]}]}", 1 << 19), 400),
    "hidden": ("/v1/completions", lambda: filled('{"prompt":"a","n":[', "[],", '0],"n":1}'), 200),
    "names": ("/tokenize", lambda: json.dumps({"return_token_strs": True, "prompt": "ab " * 100_000}).encode(), 200),
    "ids": ("/detokenize", lambda: json.dumps({"tokens": [65] * 500_000}).encode(), 200),
    "digits": ("/detokenize", lambda: filled('{"tokens":[', "9", "]}"), 400),
}


@pytest.mark.parametrize(("path", "make_body", "status"), BODIES.values(), ids=BODIES)
async def test_no_body_stalls_other_requests(api: Api, path: str, make_body: Callable[[], bytes], status: int) -> None:
    body = make_body()

    async def post() -> None:
        assert (await api.http.post(path, content=body, headers=JSON)).status_code == status

    peak_memory()
    before = peak_memory()
    assert await stall_of(post) < STALL_S
    assert peak_memory() - before < MEMORY


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["ab " * 1300] * 250},
        {"prompt": [[65] * 1000] * 64, "n": 16},
        {"prompt": [[65] * 4000] * 250, "echo": True},
    ],
    ids=["texts", "choices", "echoes"],
)
async def test_many_prompts_do_not_stall_other_requests(api: Api, fields: dict[str, Any]) -> None:
    api.service._info = replace(api.ready, max_model_len=8192)

    async def post() -> None:
        assert (await api.complete(**fields, max_tokens=1)).status_code == 200

    assert await stall_of(post) < STALL_S


HOSTILE = """{% set it = messages|length %}{% set case = messages[0].content %}
{% if case == 'repeat' %}{{ 'x' * (it * 10**10) }}{% endif %}
{% if case == 'loops' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}
{% if case == 'long' %}{{ 'x' * (it * 15 * 1024 * 1024) }}{% endif %}{{ case }}"""


async def test_hostile_chat_template_stalls_no_other_request(make_api: MakeApi, tmp_path: Path) -> None:
    """The long text is within the limit of a template's output, but has too many tokens."""
    template = tmp_path / "template"
    template.write_text(HOSTILE)
    async with make_api() as api:
        tokenizer = load_tokenizer(api.ready.folder, chat_template=template)
        api.service.conversations = Conversations(tokenizer, api.service.config.tool_format)

        async def post() -> None:
            chats = [
                api.chat(messages=[{"role": "user", "content": case}]) for case in ("repeat", "loops", "long", "hi")
            ]
            completion = api.complete(max_tokens=100, ignore_eos=True)
            *answers, completed = await asyncio.gather(*chats, completion)
            assert completed.json()["usage"]["completion_tokens"] == 100
            assert [answer.status_code for answer in answers] == [400, 400, 400, 200]
            messages = [answer.json()["error"]["message"] for answer in answers[:3]]
            assert messages[0].endswith("this conversation: it needs more than 512 MiB of memory")
            assert messages[1].endswith("this conversation: it takes more than 0.5 s of processor time")
            assert "messages must have at most" in messages[2]

        assert await stall_of(post) < STALL_S
        assert api.is_clean()


PATHS = {
    "/v1/completions": ("prompt", "stop", "metadata", "logit_bias", "n", "stream_options", "response_format"),
    "/v1/chat/completions": ("messages", "tools", "slo", "user", "documents"),
    "/tokenize": ("prompt", "messages", "chat_template_kwargs"),
    "/detokenize": ("tokens", "model"),
}
VALUES = [
    *(("[", unit, "0]") for unit in ("[],", "{},", '"",', "1,", "null,", "1e3,", '{"a":1},', "[[1]],", '"\\ud800",')),
    *(("{", unit, '"z":1}') for unit in ('"a":1,', '"":{},', '"role":"user",')),
    *(('"', unit, '"') for unit in ("x", "\\u0041", "\\ud800", "€")),
    *(("", unit, "0") for unit in ("9", "[", '{"a":', "-")),
    ('[{"role":"user","content":"', "x", '"}]'),
    *(("[", unit, "{}]") for unit in ('{"role":"user","content":""},', '{"role":"user","content":[]},')),
]


@given(st.sampled_from([(path, name) for path, names in PATHS.items() for name in names]), st.sampled_from(VALUES))
@settings(deadline=None, suppress_health_check=list(HealthCheck))
def test_no_field_value_takes_excessive_time_or_memory(
    post_body: Callable[[str, bytes], tuple[int, float, int]], field: tuple[str, str], value: tuple[str, str, str]
) -> None:
    (path, name), (begin, unit, end) = field, value
    # /tokenize accepts texts of a million tokens, and the tokenizer needs up to 160 bytes for each byte.
    size = LARGEST // 8 if path == "/tokenize" else LARGEST
    status, stall_s, memory = post_body(path, filled(f'{{"{name}":{begin}', unit, end + "}", size))
    assert status == 400 or path == "/tokenize"
    assert stall_s < STALL_S
    assert memory < MEMORY


@pytest.fixture
def post_body(tokenizer_folder: Path) -> Any:
    """Return a function that posts a body and returns the status, the stall in seconds and the memory in bytes."""
    from skipjoin.config import ServerConfig  # noqa: PLC0415

    with asyncio.Runner() as runner:

        async def make() -> Api:
            return Api(tokenizer_folder, ServerConfig())

        api = runner.run(make())

        def post(path: str, body: bytes) -> tuple[int, float, int]:
            statuses = []

            async def once() -> None:
                statuses.append((await api.http.post(path, content=body, headers=JSON)).status_code)

            for _ in range(3):  # Memory that one try leaves allocated does not count in the next.
                peak_memory()
                before = peak_memory()
                stall_s = runner.run(stall_of(once, 1))
                memory = peak_memory() - before
                if stall_s < STALL_S and memory < MEMORY:
                    break
            return statuses[0], stall_s, memory

        yield post
        runner.run(api.http.aclose())
        api.service.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_logprobs_are_formatted_off_the_event_loop(
    api: Api, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = tuple((token, -1.0 - token) for token in range(20))
    scored = TokenDetail(TokenLogprob(65, -0.5, top), (TokenLogprob(65, None), *[TokenLogprob(65, -0.25, top)] * 499))
    monkeypatch.setattr(server_worlds, "_detail", lambda *_, **__: scored)
    body = {"prompt": [[65] * 500] * 24, "max_tokens": 1, "echo": True, "logprobs": 20, "stream": stream}
    answers = []

    async def post() -> None:
        answers.append(await api.complete(**body))

    assert await stall_of(post) < STALL_S
    if not stream:
        assert [len(choice["logprobs"]["tokens"]) for choice in answers[0].json()["choices"]] == [501] * 24


async def test_number_of_prompt_logprobs_is_bounded(make_api: MakeApi) -> None:
    async with make_api(max_prompt_scores=100) as api:
        scored = {"prompt": ["x" * 10, "y" * 15], "echo": True, "max_tokens": 1}
        assert (await api.complete(**scored, logprobs=1, n=2)).status_code == 200
        for more in ({"logprobs": 2, "n": 2}, {"logprobs": 1, "n": 3}):
            error = (await api.complete(**scored, **more)).json()["error"]
            assert error["param"] == "logprobs"
            assert "at most 100 log-probabilities of prompts" in error["message"]
        chat = {"messages": [{"role": "user", "content": "x" * 60}], "prompt_logprobs": 1}
        assert (await api.chat(**chat)).json()["error"]["param"] == "prompt_logprobs"
        assert api.is_clean()


def test_prompt_logprobs_are_sent_in_parts(start_server: StartServer) -> None:
    server = start_server(context=4096)
    prompt = [65 + number % 26 for number in range(3000)]
    body = {"prompt": [prompt, prompt[:700]], "echo": True, "logprobs": 2, "max_tokens": 2}
    choices = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).json()["choices"]
    for choice, ids in zip(choices, (prompt, prompt[:700]), strict=True):
        assert choice["logprobs"]["token_logprobs"] == [None] + [-0.25] * (len(ids) - 1) + [-0.5] * 2
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


async def test_tokenization_counts_toward_the_queue_limits(make_api: MakeApi) -> None:
    async with make_api(max_queued_requests=1, max_queued_tokens=1000) as api:
        long = {"messages": [{"role": "user", "content": "x" * 4100}]}
        for path, body, param in (
            ("/tokenize", {"prompt": "x" * 4100}, "prompt"),
            ("/tokenize", long, "messages"),
            ("/detokenize", {"tokens": [1] * 1001}, "tokens"),
        ):
            error = (await api.http.post(path, json=body)).json()["error"]
            assert (error["param"], "at most 1000 tokens" in error["message"]) == (param, True)
        api.engine.paused = True
        running = asyncio.create_task(api.complete())
        while not api.engine.live:
            await asyncio.sleep(0.001)
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            assert (await api.http.post(path, json=body)).status_code == 429
        api.engine.paused = False
        await running
        assert (await api.http.post("/tokenize", json={"prompt": "a"})).status_code == 200
        assert api.is_clean()


async def test_full_queue_refuses_before_tokenization(make_api: MakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    async with make_api(max_queued_requests=8, max_queued_tokens=1 << 20) as api:
        api.engine.paused = True
        running = asyncio.create_task(api.complete(n=8))
        while not api.engine.live:
            await asyncio.sleep(0.001)
        monkeypatch.delattr(api.service.tokenizer, "backend")
        for prompt in ("abc", "ab " * 1_000_000, [65] * 500_000, ["ab " * 1000] * 8):
            content = json.dumps({"prompt": prompt}).encode()

            async def post(content: bytes = content) -> None:
                response = await api.http.post("/v1/completions", content=content, headers=JSON)
                assert response.status_code == 429
                assert 1 <= int(response.headers["retry-after"]) <= 60

            assert await stall_of(post) < STALL_S
        api.engine.paused = False
        monkeypatch.undo()
        await running
        assert api.is_clean()


class Reader:
    """ASGI client that reads no part of a response's body before `reads` is set."""

    def __init__(self, api: Api, **body: Any) -> None:
        self.body = b""
        self.reads = asyncio.Event()
        self._parts = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
            "query_string": b"", "root_path": "",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        }  # fmt: skip
        self.task = asyncio.create_task(api.app(scope, self._receive, self._send))  # type: ignore[arg-type]

    async def _receive(self) -> Any:
        if self._parts:
            return self._parts.pop()
        await asyncio.Event().wait()

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            await self.reads.wait()
            self.body += message["body"]


@pytest.mark.parametrize("stream", [False, True])
async def test_response_holds_its_queue_slots_until_it_is_read(api: Api, stream: bool) -> None:
    reader = Reader(api, prompt="abc", n=3, max_tokens=50, stream=stream)
    async with asyncio.timeout(10):
        while not api.engine.added or api.engine.live:
            await asyncio.sleep(0.001)
        assert api.engine.client.active == 0
        assert api.service.admission.requests == 3
        reader.reads.set()
        await reader.task
    assert api.is_clean()
    assert reader.body.count(b"length") == 3


async def test_unread_output_ends_the_stream(api: Api) -> None:
    reader = Reader(api, prompt="abc", n=16, max_tokens=tiny.CONTEXT - 3, stream=True, logprobs=20, ignore_eos=True)
    async with asyncio.timeout(20):
        while not api.engine.aborted:
            await asyncio.sleep(0.001)
        assert len(api.engine.aborted) == 16
        assert not api.engine.live
        assert api.service.admission.requests == 16
        reader.reads.set()
        await reader.task
    *_, last, end = reader.body.split(b"\n\n")
    assert end == b""
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "slow_reader"
    assert api.is_clean()


async def test_mailbox_is_bounded_and_read_in_parts() -> None:
    full = []
    mailbox = OutputQueue(lambda: full.append(1))
    detail = TokenDetail(TokenLogprob(1, -1.0, ((1, -1.0),) * 14))
    max_outputs = (MAX_WAITING + MAX_OF_SEQUENCE) // 16
    for number in range(2 * max_outputs):
        mailbox.put(Output(number, 1, detail))
    await asyncio.sleep(0)
    assert full == [1]
    taken: list[Output] = []
    while len(taken) <= max_outputs:
        part = await mailbox.get()
        assert 0 < len(part) <= 256
        taken += part
    mailbox.fail(KeyError("it is full"))
    mailbox.put(Output(0, 1, detail))
    with pytest.raises(KeyError, match="it is full"):
        await mailbox.get()
    assert [output.choice for output in taken] == list(range(max_outputs + 1))
