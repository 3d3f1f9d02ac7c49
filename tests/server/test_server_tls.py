from __future__ import annotations

import errno
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from urllib.error import URLError

import httpx
import pytest
from server_worlds import ServerProcess, StartServer
from typer.testing import CliRunner

from skipjoin.cli import app
from skipjoin.system.unreachable import why_unreachable

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    files = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-out", files[0], "-keyout", files[1]], check=True, capture_output=True)
    return files


def test_server_speaks_tls(start_server: StartServer, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    server = start_server(ssl_certfile=cert, ssl_keyfile=key, max_body_bytes=1000)
    assert server.url.startswith("https://")
    with httpx.Client(verify=ssl.create_default_context(cafile=str(cert))) as client:
        body = {"prompt": "abc", "max_tokens": 5, "ignore_eos": True}
        assert client.post(f"{server.url}/v1/completions", json=body).json()["usage"]["completion_tokens"] == 5
        with client.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}) as stream:
            assert list(stream.iter_lines())[-2] == "data: [DONE]"
        # The server answers before it has read the body.
        assert client.post(f"{server.url}/v1/completions", content=b"x" * 5_000_000).status_code == 413
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url.replace("https", "http") + "/health")
    assert "its certificate is not trusted (self-signed certificate); SSL_CERT_FILE names" in why_not_shown(server.url)


def why_not_shown(url: str) -> str:
    run = CliRunner().invoke(app, ["top", "--once", "--url", url])
    assert run.exit_code == 1
    return run.stderr


def test_client_says_why_a_server_cannot_be_reached(server: ServerProcess) -> None:
    assert "it does not speak TLS as this client does" in why_not_shown(server.url.replace("http", "https"))
    assert why_unreachable(socket.gaierror(socket.EAI_NONAME, "Name not known")) == "Name not known"
    assert why_unreachable(URLError(ConnectionRefusedError(errno.ECONNREFUSED, "x"))) == "connection refused"


def test_clients_need_a_certificate_if_authorities_are_given(
    start_server: StartServer, certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate
    server = start_server(ssl_certfile=cert, ssl_keyfile=key, ssl_ca_certs=cert)
    trusting = ssl.create_default_context(cafile=str(cert))
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{server.url}/live", verify=trusting)
    trusting.load_cert_chain(cert, key)
    assert httpx.get(f"{server.url}/live", verify=trusting).status_code == 200
