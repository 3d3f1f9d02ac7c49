from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families
from server_worlds import BLOCKS, HERE, Api, MakeApi, ServerProcess, StartServer, outcome_of, simulated_server
from simulated_engine import SimulatedLoop

from skipjoin.config import ConfigError, EngineConfig, ServerConfig
from skipjoin.config.key_files import KeyRights, owner_of_key
from skipjoin.core.events import Event
from skipjoin.core.kv.ledger import KVLedger, LedgerError
from skipjoin.observe.metric_snapshot import Snapshot
from skipjoin.observe.metrics import EngineMetrics
from skipjoin.sampling import SamplingParams
from skipjoin.server.api.app import build_metrics_app
from skipjoin.server.engines.engine_server import EngineServer
from skipjoin.server.engines.messages import Add, FromEngine, Setup, Shutdown, Stats, StepOutputs, ToEngine
from skipjoin.server.engines.self_checks import recover_blocks
from support.load import make

pytestmark = pytest.mark.anyio

GOLDEN = HERE / "metrics_names.txt"
Numbers = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def names(text: str) -> list[str]:
    found = []
    for family in text_string_to_metric_families(text):
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        total = "_total" if family.type == "counter" else ""
        found.append(" ".join([family.name + total, family.type, *sorted(labels)]))
    return found


def numbers(text: str) -> Numbers:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(server: ServerProcess) -> Numbers:
    return numbers(httpx.get(f"{server.url}/metrics").text)


def sent(snapshot: Snapshot) -> Stats:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(Stats(7, snapshot)), type=FromEngine)  # type: ignore[return-value]


async def test_metric_names_are_stable(make_api: MakeApi) -> None:
    """Dashboards depend on them."""
    async with make_api(metrics_compat="vllm") as api:
        found = names((await api.http.get("/metrics")).text)
    assert found == GOLDEN.read_text().splitlines()


async def test_without_compatibility_names_have_the_skipjoin_prefix(api: Api) -> None:
    found = names((await api.http.get("/metrics")).text)
    assert found == [line for line in GOLDEN.read_text().splitlines() if line.startswith("skipjoin:")]


def test_unknown_compatibility_is_refused() -> None:
    with pytest.raises(ConfigError, match="metrics_compat must be one of none, vllm, got 'tgi'"):
        ServerConfig(metrics_compat="tgi")


async def test_vllm_names_have_the_same_values(make_api: MakeApi) -> None:
    snapshot = Snapshot.zero()
    # Each row has values for real-time requests, followed by those for best-effort requests.
    snapshot.row("generation_tokens_total")[:] = [7, 4]
    snapshot.row("request_success_total")[:] = [0, 2, 0, 0, 0, 0, 1, 0, 0, 0]
    snapshot.row("num_preemptions_total")[:] = [30, 1, 1, 0, 10, 0, 0, 1]  # paused, spilled, swapped, dropped
    snapshot.row("time_to_first_token_seconds")[:] = [2, *[0] * 14, 0, 0.005, *[0] * 15, 1, 400.5]
    async with make_api(metrics_compat="vllm", served_model_name="org/x") as api:
        api.engine.tell(sent(snapshot))
        found = numbers((await api.http.get("/metrics")).text)

    def value(name: str, **labels: str) -> float:
        return found[name, tuple(sorted(labels.items()))]

    ours = [("skipjoin", {"class": name}) for name in ("real-time", "best-effort")]
    for (prefix, labels), tokens, finished, (first, last, total) in zip(
        [*ours, ("vllm", {"model_name": "org/x", "engine": "0"})],
        (7, 4, 11),
        (2, 1, 3),
        ((2, 2, 0.005), (0, 1, 400.5), (2, 3, 400.505)),
        strict=True,
    ):
        assert value(f"{prefix}:generation_tokens_total", **labels) == tokens
        assert value(f"{prefix}:request_success_total", finished_reason="length", **labels) == finished
        ttft = f"{prefix}:time_to_first_token_seconds"
        assert value(f"{ttft}_bucket", le="0.005", **labels) == value(f"{ttft}_bucket", le="300.0", **labels) == first
        assert value(f"{ttft}_bucket", le="+Inf", **labels) == value(f"{ttft}_count", **labels) == last
        assert value(f"{ttft}_sum", **labels) == total
    assert value("skipjoin:num_preemptions_total", **ours[0][1], how="pause") == 30
    assert value("skipjoin:num_preemptions_total", **ours[1][1], how="drop") == 1
    assert value("vllm:num_preemptions_total", model_name="org/x", engine="0") == 3
    pool = {"block_size": "16", "num_cpu_blocks": "0", "num_gpu_blocks": str(BLOCKS), "recipe": "fcfs"}
    pool |= {"swap_dtype": "auto"}
    assert found["skipjoin:cache_config_info", tuple(pool.items())] == 1
    theirs = {**pool, "model_name": "org/x", "engine": "0"}
    assert found["vllm:cache_config_info", tuple(sorted(theirs.items()))] == 1


async def test_counters_survive_the_death_of_the_engine(api: Api) -> None:
    snapshot = Snapshot.zero()
    snapshot.row("num_requests_running")[:] = [3, 1]
    snapshot.row("kv_cache_usage_perc")[0] = 0.5
    snapshot.row("engine_steps_total")[0] = 9
    api.engine.tell(sent(snapshot))
    before = numbers((await api.http.get("/metrics")).text)
    assert before["skipjoin:num_requests_running", (("class", "real-time"),)] == 3
    assert (await api.http.get("/load")).json()["running"] == 4
    api.engine.client.died()
    after = numbers((await api.http.get("/metrics")).text)
    changed = {name for (name, _), value in after.items() if before[name, _] != value}
    changed -= {"skipjoin:http_responses_total", "skipjoin:api_resident_memory_bytes"}
    assert changed == {f"skipjoin:{name}" for name in ("num_requests_running", "kv_cache_usage_perc", "replicas_alive")}
    assert after["skipjoin:engine_steps_total", ()] == 9


async def test_responses_are_counted_by_status(make_api: MakeApi) -> None:
    async with make_api(api_keys=("right",), metrics_keys=("scrape",)) as api:
        key = {"Authorization": "Bearer right"}
        for path, headers in (("/health", {}), ("/v1/models", {}), ("/v1/models", key), ("/nothing", key)):
            await api.http.get(path, headers=headers)
        assert (await api.http.post("/v1/completions", headers=key, content="{}")).status_code == 415
        assert (await api.http.request("BREW", "/v1/completions", headers=key)).status_code == 405
        stream = await api.http.post("/v1/completions", headers=key, json={"prompt": "abc", "stream": True})
        assert stream.status_code == 200
        found = numbers((await api.http.get("/metrics", headers={"Authorization": "Bearer scrape"})).text)
    counted = {labels[0][1]: value for (name, labels), value in found.items() if name.endswith("http_responses_total")}
    assert {status: count for status, count in counted.items() if count} == {
        "200": 3,
        "401": 1,
        "404": 1,
        "405": 1,
        "415": 1,
    }


@pytest.mark.parametrize(
    ("settings", "opens"),
    [
        ({"api_keys": ("right",)}, {"/metrics": {"right"}, "/load": {"right"}}),
        ({"api_keys": ("right",), "metrics_keys": ("scrape",)}, {"/metrics": {"right", "scrape"}, "/load": {"right"}}),
        ({"metrics_keys": ("scrape",)}, {"/metrics": {"scrape"}, "/load": {"right", "scrape", "none"}}),
    ],
)
async def test_metrics_key_opens_metrics_only(
    make_api: MakeApi, settings: dict[str, tuple[str]], opens: dict[str, set[str]]
) -> None:
    async with make_api(**settings) as api:
        for path, keys in opens.items():
            for key in ("right", "scrape", "none"):
                response = await api.http.get(path, headers={"Authorization": f"Bearer {key}"})
                assert response.status_code == (200 if key in keys else 401), (path, key)
            assert (await api.http.get(path)).status_code == (200 if "none" in keys else 401)


async def test_metrics_of_several_keys_need_a_right(make_api: MakeApi) -> None:
    """From changes of the totals a key could tell the lengths of others' requests."""
    rights = {owner_of_key(b"operator"): KeyRights(is_operator=True)}
    keys = ("one", "two", "operator")
    async with make_api(api_keys=keys, metrics_keys=("scrape",), key_rights=rights) as api:
        statuses = {}
        for key in (*keys, "scrape"):
            answer = await api.http.get("/metrics", headers={"Authorization": f"Bearer {key}"})
            statuses[key] = answer.status_code
        assert statuses == {"one": 403, "two": 403, "operator": 200, "scrape": 200}


@pytest.mark.parametrize("keys", [(), ("scrape",)])
async def test_metrics_port_serves_metrics_only(make_api: MakeApi, keys: tuple[str, ...]) -> None:
    async with make_api(api_keys=("right",), metrics_keys=keys) as api:
        transport = httpx.ASGITransport(build_metrics_app(api.service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
            assert (await http.get("/metrics")).status_code == (401 if keys else 200)
            assert (await http.get("/metrics", headers=headers)).text.count("skipjoin:replicas_alive 1.0") == 1
            for path in ("/v1/models", "/load", "/v1/completions", "/openapi.json", "/docs"):
                assert (await http.get(path, headers=headers)).status_code == 404


async def test_choices_and_rejections_are_counted(make_api: MakeApi) -> None:
    async with make_api(max_queued_requests=3, max_queued_tokens=50) as api:
        assert (await api.complete(n=3, max_tokens=1)).status_code == 200
        assert (await api.complete(n=1, max_tokens=1)).status_code == 200
        assert (await api.complete(n=2, top_p=7)).status_code == 400
        api.service.admission.reserve([45, 0])
        assert (await api.complete(n=2)).status_code == 429
        assert (await api.complete(prompt="x" * 40)).status_code == 429
        api.service.drain()
        assert (await api.complete()).status_code == 503
        found = numbers((await api.http.get("/metrics")).text)
    assert (found["skipjoin:request_params_n_count", ()], found["skipjoin:request_params_n_sum", ()]) == (2, 4)
    reasons = {
        reason: found["skipjoin:admission_rejected_total", (("reason", reason),)]
        for reason in ("requests", "tokens", "draining")
    }
    assert reasons == {"requests": 1, "tokens": 1, "draining": 1}


class Wire:
    """Socket that delivers one request and a shutdown after its end, and records sent messages."""

    def __init__(self, request: Add) -> None:
        self._inbox: list[ToEngine] = [request]
        self.sent: list[FromEngine] = []

    def poll(self, milliseconds: int) -> bool:
        return bool(self._inbox)

    def recv(self, flags: int) -> bytes:
        if not self._inbox:
            raise zmq.Again
        return msgspec.msgpack.encode(self._inbox.pop())

    def send(self, frame: bytes, flags: int) -> None:
        message: FromEngine = msgspec.msgpack.decode(frame, type=FromEngine)  # type: ignore[arg-type]
        self.sent.append(message)
        if isinstance(message, StepOutputs) and message.ended:
            self._inbox.append(Shutdown())


REQUEST = Add(1, [5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True))
SETUP = Setup(EngineConfig(), "", 0)


def stats_of(wire: Wire, loop: SimulatedLoop) -> Stats:
    """Run the request of a wire, and return the numbers that are sent before its last output."""
    metrics = EngineMetrics(device_blocks=BLOCKS, block_size=16, block_bytes=1)
    EngineServer(wire, os.getppid()).run(loop, metrics)  # type: ignore[arg-type]
    *_, numbers, last = wire.sent
    assert isinstance(last, StepOutputs)
    assert last.ended == [(1, "length")]
    assert isinstance(numbers, Stats)
    return numbers


def test_stats_are_sent_before_the_last_output() -> None:
    """A client that has its response must find it counted."""
    wire = Wire(REQUEST)
    numbers = stats_of(wire, SimulatedLoop(SETUP, 0.0, BLOCKS, 100))
    assert numbers.metrics.row("generation_tokens_total") == [4, 0]
    assert (numbers.running, numbers.waiting, numbers.blocks_used) == (0, 0, 0)
    started = [message.started for message in wire.sent if isinstance(message, StepOutputs) and message.started]
    assert started == [[1]]


class LeakyLoop(SimulatedLoop):
    leaked: Sequence[int] = ()

    def step(self) -> list[Event]:
        events = super().step()
        self.leaked = self.leaked or self.core.kv.device.take(3)
        return events


def test_leaked_blocks_are_counted_and_freed(caplog: pytest.LogCaptureFixture) -> None:
    numbers = stats_of(Wire(REQUEST), LeakyLoop(SETUP, 0.0, BLOCKS, 100))
    assert numbers.metrics.row("kv_blocks_recovered_total") == [3]
    assert numbers.blocks_used == 0
    assert "3 KV blocks were neither free nor held" in caplog.text


def test_blocks_held_by_an_idle_engine_are_freed() -> None:
    kv = KVLedger(8, 4, 16)
    assert recover_blocks(kv, is_idle=True) == 0
    kv.grow(make(1, 40), 40)
    assert recover_blocks(kv, is_idle=False) == 0
    assert recover_blocks(kv, is_idle=True) == 3
    kv.check()
    assert (kv.device_free, kv.tiers.cpu_free) == (8, 4)


def test_block_in_two_places_is_an_error() -> None:
    """Requests that share a block overwrite each other's KV."""
    kv = KVLedger(8, 4, 16)
    kv.device.put([5])
    with pytest.raises(LedgerError, match="two places at once: 1 too many"):
        recover_blocks(kv, is_idle=False)


def test_outputs_are_sent_before_the_next_step_is_planned() -> None:
    latest: list[int] = []

    class Watching(Wire):
        def send(self, frame: bytes, flags: int) -> None:
            super().send(frame, flags)
            message = self.sent[-1]
            if isinstance(message, StepOutputs) and message.tokens:
                latest.append(loop.core.scheduler.latest_plan)

    loop = SimulatedLoop(SETUP, 0.0, BLOCKS, 100)
    stats_of(Watching(REQUEST), loop)
    assert latest == [0, 1, 2, 3]


@pytest.fixture(scope="module")
def recorded(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Path]]:
    path = tmp_path_factory.mktemp("timeline") / "trace.json"
    path.write_text("what was there before")
    server = simulated_server(tokenizer_folder, 0.001, BLOCKS, metrics_compat="vllm", timeline=path)
    yield server, path
    server.stop()


def test_metrics_agree_with_client_measurements(recorded: tuple[ServerProcess, Path]) -> None:
    """Counts are equal as soon as the last response arrives. Times are at most those of clients."""
    server, _ = recorded

    def stream(client: httpx.Client, number: int) -> tuple[float, float, int, int]:
        """Return the seconds to the first event and to the end, and prompt and completion tokens."""
        options = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        body = {"prompt": "a" * (3 + number), "max_tokens": 1 + number % 9, **options}
        begin, first = time.monotonic(), 0.0
        with client.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    first = first or time.monotonic() - begin
                    last = json.loads(line.removeprefix("data: "))
        return first, time.monotonic() - begin, last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]

    with httpx.Client() as client, ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(lambda number: stream(client, number), range(30)))
    found = scrape(server)
    first_s, end_s, prompts, outputs = (sum(column) for column in zip(*seen, strict=True))
    assert outputs == sum(1 + number % 9 for number in range(30))

    def value(name: str, **labels: str) -> float:
        ours = tuple(sorted(labels.items()))
        theirs = found[f"vllm:{name}", tuple(sorted({**labels, "model_name": "tiny", "engine": "0"}.items()))]
        by_class = ((*ours, ("class", "real-time")), (*ours, ("class", "best-effort")))
        plain = found.get((f"skipjoin:{name}", ours))
        assert theirs == (
            sum(found[f"skipjoin:{name}", tuple(sorted(labels))] for labels in by_class) if plain is None else plain
        )
        return theirs

    assert value("request_success_total", finished_reason="length") == 30
    assert (value("prompt_tokens_total"), value("generation_tokens_total")) == (prompts, outputs)
    assert (value("request_prompt_tokens_sum"), value("request_generation_tokens_sum")) == (prompts, outputs)
    assert value("request_params_n_count") == value("request_params_n_sum") == 30
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_inference_time"):
        assert value(f"{name}_seconds_count") == 30
    assert value("inter_token_latency_seconds_count") == outputs - 30
    assert 0 < value("time_to_first_token_seconds_sum") <= first_s
    assert value("time_to_first_token_seconds_sum") <= value("e2e_request_latency_seconds_sum") <= end_s
    assert value("num_requests_running") == value("num_requests_waiting") == value("kv_cache_usage_perc") == 0
    assert found["skipjoin:engine_steps_total", ()] == value("iteration_tokens_total_count")
    assert value("prefix_cache_queries_total") == prompts
    hits = found["skipjoin:prefix_cache_hits_total", (("tier", "device"),)]
    assert found["vllm:prefix_cache_hits_total", (("engine", "0"), ("model_name", "tiny"))] == hits > 0
    # All other prompt tokens and all generated tokens except the last ones are computed once.
    assert value("iteration_tokens_total_sum") == prompts - hits + outputs - 30
    assert found["skipjoin:kv_cached_blocks", ()] >= 2
    assert found["skipjoin:kv_shared_blocks", ()] == 0


def test_unanswered_requests_are_counted_by_finish_reason(start_server: StartServer) -> None:
    server = start_server(step_s=0.01)
    late = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 400, "deadline_ms": 100})
    assert late.status_code == 408
    body = {"prompt": "a", "max_tokens": 400, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as response:
        next(response.iter_lines())
    server.wait_idle()
    found = scrape(server)
    counts = {
        reason: found["skipjoin:request_success_total", (("class", "real-time"), ("finished_reason", reason))]
        for reason in ("stop", "length", "abort", "deadline")
    }
    assert counts == {"stop": 0, "length": 0, "abort": 1, "deadline": 1}
    assert found["skipjoin:deadline_dropped_total", ()] == 1


def test_a_server_writes_its_timeline(recorded: tuple[ServerProcess, Path]) -> None:
    server, path = recorded
    generated = server.metric("generation_tokens_total")
    for _ in range(3):
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "abc", "max_tokens": 5, "n": 2, "ignore_eos": True})
    server.wait_idle()
    # An idle engine has written all finished spans.
    spans = [entry for entry in json.loads(path.read_text() + "]") if entry["ph"] == "X"]
    assert sum(span["args"].get("generated", 0) for span in spans) == generated + 30
    assert {span["args"]["left"] for span in spans if span["name"] == "decode"} == {"length"}
    assert sum(span["name"] == "step" for span in spans) == scrape(server)["skipjoin:engine_steps_total", ()]
    server.stop()
    assert [entry for entry in json.loads(path.read_text()) if entry["ph"] == "X"] == spans


def test_unwritable_timeline_is_refused_before_loading(tokenizer_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "trace.json"
    code, errors = outcome_of("simulated", str(tokenizer_folder), "0", "9", "9", f"timeline={path}")
    assert code == 2
    assert f"timeline {path} cannot be written" in errors
    assert "pretending to load" not in errors
