from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from queue import Queue
from typing import Any

import httpx
import pytest
from server_worlds import StartServer

collector = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
tracing = pytest.importorskip("skipjoin.server.engines.tracing")
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def endpoint() -> Iterator[tuple[str, Queue[Any], threading.Event]]:
    """Run a collector that is first busy; yield its URL, the received spans, and whether it was busy."""
    spans: Queue[Any] = Queue()
    was_busy = threading.Event()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200 if was_busy.is_set() else 503)
            self.end_headers()
            if was_busy.is_set():
                for resource in collector.ExportTraceServiceRequest.FromString(body).resource_spans:
                    for scope in resource.scope_spans:
                        for span in scope.spans:
                            spans.put((resource.resource, span))
            was_busy.set()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans, was_busy
    server.shutdown()
    thread.join()
    server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {
        attribute.key: getattr(attribute.value, attribute.value.WhichOneof("value")) for attribute in span.attributes
    }


def test_request_continues_the_trace_of_its_client(start_server: StartServer, endpoint: Any) -> None:
    url, received, was_busy = endpoint
    server = start_server(otlp_traces_endpoint=url)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    body = {"prompt": "abc", "max_tokens": 5, "n": 2, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).raise_for_status().json()
    body |= {"n": 1}
    for parent in ("nonsense", f"00-{TRACE}-{PARENT}-00"):  # a new trace, and one that its client does not sample
        httpx.post(f"{server.url}/v1/completions", json=body, headers={"traceparent": parent})
    server.wait_idle()
    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"]
    assert was_busy.wait(10)
    server.stop()  # sends what remains
    spans = [received.get(timeout=10) for _ in range(received.qsize())]
    roots = [span for _, span in spans if span.name == "request"]
    own = [root for root in roots if root.trace_id.hex() == TRACE]
    assert (len(roots), len(own)) == (3, 2)
    for root in own:
        assert root.parent_span_id.hex() == PARENT
        assert attributes(root)["gen_ai.request.id"] == "mine"
        assert attributes(root)["gen_ai.response.id"] == answer["id"]
        assert attributes(root)["gen_ai.operation.name"] == "text_completion"
        assert attributes(root)["gen_ai.provider.name"] == "skipjoin"
        assert (root.kind, root.flags) == (root.SPAN_KIND_SERVER, 0x300)
        found = attributes(root)
        assert (found["gen_ai.usage.output_tokens"], found["gen_ai.request.model"]) == (5, model)
        assert [value.string_value for value in found["gen_ai.response.finish_reasons"].values] == ["length"]
        assert 0 < found["gen_ai.latency.time_to_first_token"] < 60
        children = {span.name: span for _, span in spans if span.parent_span_id == root.span_id}
        assert set(children) == {"queue", "prefill", "decode"}
        queue, prefill, decode = (children[name] for name in ("queue", "prefill", "decode"))
        assert root.start_time_unix_nano == queue.start_time_unix_nano
        assert queue.end_time_unix_nano == prefill.start_time_unix_nano
        assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert {attribute.key: attribute.value.string_value for attribute in spans[0][0].attributes}[
        "service.name"
    ] == "skipjoin"


def test_unreachable_collector_does_not_disturb_requests(start_server: StartServer) -> None:
    server = start_server(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces")
    for _ in range(3):
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "abc", "max_tokens": 5}).status_code == 200


def test_spans_beyond_a_bound_are_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "_INTERVAL_S", 60.0)
    monkeypatch.setattr(tracing, "_MAX_WAITING", 2)
    sender = tracing.SpanSender("http://127.0.0.1:9/v1/traces", b"".join)
    for _ in range(5):
        sender.put(b"spans")
    sender.close()
    assert "cannot be reached: " in caplog.text
    assert "spans of 5 requests were dropped, and those of 0 are kept" in caplog.text
