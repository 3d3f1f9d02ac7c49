from __future__ import annotations

import json

import httpx
import openai
import pytest
from server_worlds import JSON, Api, MakeApi

from skipjoin.config import ConfigError, ServerConfig

pytestmark = pytest.mark.anyio

BODY = json.dumps({"prompt": "abcdef", "max_tokens": 2})
PAGE = "https://chat.example.com"
KEY = {"Authorization": "Bearer right"}


async def ask(api: Api, **headers: str) -> httpx.Response:
    """Send a completion request with the given headers, in whose names underscores stand for hyphens."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await api.http.post("/v1/completions", content=BODY, headers=JSON | named)


def code_of(response: httpx.Response) -> str | None:
    return None if response.status_code == 200 else response.json()["error"]["code"]


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        *((host, True) for host in ("localhost", "LOCALHOST:8000", "localhost.:80", "127.0.0.1:8000", "[::1]:8000")),
        *((host, True) for host in ("ui.localhost", "192.168.1.5", "llm.example.com", "LLM.example.com:8000")),
        *((host, False) for host in ("evil", "evil.com:8000", "localhost.evil.com", "127.0.0.1.evil.com", "")),
        *((host, False) for host in ("evil.com:80:80", "[::1", "::1", "llm.example.com.evil.com", "localhost@evil")),
    ],
)
async def test_unknown_host_names_are_rejected(make_api: MakeApi, host: str, is_allowed: bool) -> None:
    """In a DNS rebinding attack, Host is the attacker's name, which resolves to this machine."""
    async with make_api(allowed_hosts=("llm.example.com",)) as api:
        response = await ask(api, Host=host)
        assert (response.status_code, code_of(response)) == ((200, None) if is_allowed else (403, "host_not_allowed"))
        assert (await api.http.get("/health", headers={"Host": host})).status_code == 200
        assert api.is_clean()


async def test_requests_without_a_host_are_from_no_browser(make_api: MakeApi) -> None:
    async with make_api() as api:
        for more, code in ((), 200), (((b"Host", b"evil.com"), (b"Host", b"localhost")), 403):
            request = httpx.Request("GET", "http://test/v1/models")
            request.headers = httpx.Headers(list(more))
            assert (await api.http.send(request)).status_code == code


@pytest.mark.parametrize(
    ("settings", "is_allowed"),
    [
        ({}, False),
        ({"host": "localhost"}, False),
        ({"api_keys": ("right",)}, True),
        ({"host": "0.0.0.0"}, True),
        ({"allowed_hosts": ("*",), "cors_origins": ("*",)}, True),
        ({"host": "0.0.0.0", "allowed_hosts": ("name",)}, False),
        ({"api_keys": ("right",), "allowed_hosts": ("name",)}, False),
    ],
)
async def test_host_and_origin_checks_depend_on_configuration(
    make_api: MakeApi, settings: dict[str, object], is_allowed: bool
) -> None:
    async with make_api(**settings) as api:
        response = await ask(api, Host="evil.com", Origin="http://evil.com", **KEY)
        assert response.status_code == (200 if is_allowed else 403)


@pytest.mark.parametrize(
    ("origin", "is_allowed"),
    [("http://localhost:8000", True), (PAGE, True), ("http://localhost:3000", False), ("http://evil.com", False),
     ("null", False), ("http://[", False), (PAGE + ".evil.com", False), ("http://evil.com/localhost:8000", False)],
)  # fmt: skip
async def test_cross_origin_requests_are_rejected(make_api: MakeApi, origin: str, is_allowed: bool) -> None:
    async with make_api(cors_origins=(PAGE,)) as api:
        response = await ask(api, Host="localhost:8000", Origin=origin)
        assert code_of(response) == (None if is_allowed else "origin_not_allowed")
        upload = await api.http.post("/v1/files", files={"file": b""}, headers={"Origin": "http://evil.com"})
        assert upload.status_code == 403  # browsers send forms without a preflight
    async with make_api(api_keys=("right",)) as api:
        assert (await ask(api, Origin=origin, **KEY)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_json_content_type_is_required(api: Api, path: str) -> None:
    """Browsers send these types without a preflight, and the second one is curl's default."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=b", "json", ""):
        response = await api.http.post(path, content=BODY, headers={"Content-Type": kind} if kind else {})
        assert (response.status_code, code_of(response)) == (415, "unsupported_media_type")
        message = response.json()["error"]["message"]
        assert "application/json" in message
        assert (kind.partition(";")[0] or "got none") in message
    assert not api.engine.added


async def test_compressed_bodies_are_refused_by_their_header(api: Api) -> None:
    refused = await ask(api, Content_Type="application/json", Content_Encoding="gzip")
    assert (refused.status_code, code_of(refused)) == (415, "unsupported_media_type")
    assert "Content-Encoding says 'gzip'" in refused.json()["error"]["message"]
    assert (await ask(api, Content_Type="application/json", Content_Encoding="identity")).status_code == 200


async def test_programs_may_leave_out_the_content_type_as_examples_for_ollama_do(make_api: MakeApi) -> None:
    async with make_api(api_keys=("right",)) as api:
        for page, code in ({}, 200), ({"Origin": "http://evil.com"}, 415):
            headers = {"Content-Type": "application/x-www-form-urlencoded", **KEY, **page}
            response = await api.http.post("/api/show", content=b'{"model": "tiny"}', headers=headers)
            assert response.status_code == code, response.text
            body = b'{"model": "tiny", "prompt": "Count", "stream": false}'
            response = await api.http.post("/api/generate", content=body, headers=headers)
            assert response.status_code == code, response.text


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", "application/vnd.x+json"])
async def test_json_content_type_variants_are_accepted(api: Api, kind: str) -> None:
    assert (await ask(api, Content_Type=kind)).status_code == 200


async def test_openai_client_passes_browser_checks(api: Api) -> None:
    client = openai.AsyncOpenAI(api_key="none", base_url="http://127.0.0.1:8000/v1", http_client=api.http)
    assert (await client.completions.create(model="tiny", prompt="abc", max_tokens=2)).usage.completion_tokens == 2
    stream = await client.completions.create(model="tiny", prompt="abc", max_tokens=2, stream=True)
    assert len([event async for event in stream]) >= 2


async def test_cors_headers_for_configured_origins(make_api: MakeApi) -> None:
    preflight_headers = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    preflight_headers |= {"Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"}
    async with make_api(api_keys=("right",), cors_origins=(PAGE, "http://localhost:3000")) as api:
        preflight = await api.http.options("/v1/completions", headers=preflight_headers)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == PAGE
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        for headers, status in (({"Origin": PAGE} | KEY, 200), ({"Origin": PAGE}, 401)):
            response = await ask(api, **headers)
            assert (response.status_code, response.headers["access-control-allow-origin"]) == (status, PAGE)
            assert response.headers["x-request-id"]
        assert "x-request-id" in response.headers["access-control-expose-headers"].lower()
        rejected = await api.http.options("/v1/completions", headers=preflight_headers | {"Origin": "https://evil.com"})
        assert rejected.status_code == 400
        other = await ask(api, Origin="https://evil.com", **KEY)
        assert "access-control-allow-origin" not in {*rejected.headers, *other.headers}


async def test_no_cors_headers_without_configured_origins(make_api: MakeApi) -> None:
    async with make_api(api_keys=("right",)) as api:
        response = await ask(api, Origin=PAGE, **KEY)
        preflight = await api.http.options(
            "/v1/completions", headers={"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        )
        assert (response.status_code, preflight.status_code) == (200, 401)
        assert not [name for name in (*response.headers, *preflight.headers) if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"allowed_hosts": ("http://x",)}, "allowed_hosts must be"),
        ({"allowed_hosts": ("x:8000",)}, r"allowed_hosts must be \* or names .* without a port, got 'x:8000'"),
        ({"allowed_hosts": ("",)}, "allowed_hosts must be"),
        ({"cors_origins": ("x.com",)}, r"cors_origins must be \* or like https://chat.example.com"),
        ({"cors_origins": ("https://x.com/",)}, "cors_origins must be .* without a path, got 'https://x.com/'"),
        ({"cors_origins": ("https://X.com",)}, "cors_origins must be .* in small letters"),
        ({"cors_origins": ("null",)}, "cors_origins must be"),
    ],
)
async def test_invalid_hosts_and_origins_in_settings_are_rejected(
    settings: dict[str, tuple[str]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**settings)
