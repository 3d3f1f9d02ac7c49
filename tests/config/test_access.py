from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from skipjoin.cli import app
from skipjoin.config import ConfigError, ServerConfig
from skipjoin.config.access import with_keys_of_files
from skipjoin.config.key_files import owner_of_key
from skipjoin.server import lifecycle
from skipjoin.server.settings import Settings

pytestmark = pytest.mark.usefixtures("log_of_process")

VARIABLE = "SKIPJOIN_API_KEY"


class Started:
    """Fake server that records its configuration and exits."""

    configs: list[ServerConfig]

    def __init__(self, settings: Settings, *_: object) -> None:
        self.configs.append(settings.server)

    async def run(self, *listeners: object) -> int:
        return 0


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(Started, "configs", [], raising=False)
    monkeypatch.setattr(lifecycle, "Server", Started)
    return Started.configs


def serve(*options: object) -> Result:
    return CliRunner().invoke(app, ["serve", "--port", "0", *map(str, options)])


def test_keys_are_read_from_environment_options_and_files(
    configs: list[ServerConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nfirst\n\n  second, third \n")
    assert serve("--api-key-file", file).exit_code == 0
    monkeypatch.setenv(VARIABLE, "one key, with blanks")
    for options in ((), ("--api-key", "a b", "--api-key", "c"), ("--api-key-file", file)):
        assert serve(*options).exit_code == 0
    in_file = ("first", "second, third")
    assert [config.api_keys for config in configs] == [
        in_file,
        ("one key, with blanks",),
        ("a b", "c"),
        ("one key, with blanks", *in_file),
    ]


def test_empty_key_variable_is_an_error(configs: list[ServerConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    run = serve()
    assert (run.exit_code, run.stderr) == (2, f"error: {VARIABLE} is set but empty: give it a value, or unset it\n")
    assert serve("--api-key", "given").exit_code == 0
    assert [config.api_keys for config in configs] == [("given",)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "--api-key-file FILE cannot be read: No such file"),
        (b"", "--api-key-file FILE must have a key, one per line, and has none"),
        (b"# none\n\n", "--api-key-file FILE must have a key"),
        (b"\xff\xfe", "--api-key-file FILE is not UTF-8 text"),
        (b"right\nsecr\xc3\xa9t\n", "--api-key-file FILE, line 2: must be printable ASCII"),
        (
            b"[priority-range=5]\na",
            "--api-key-file FILE, line 1: priority-range must be two integers, LOW:HIGH, got '5'",
        ),
        (
            b"a\n[priority-range=3:2]\nb",
            "--api-key-file FILE, line 2: priority-range must be LOW:HIGH of 64 bits, LOW at",
        ),
        (b"[priority-tier=flex]\na", "--api-key-file FILE, line 1: priority-tier must be one of none, all, got 'flex'"),
        (b"[operator=all]\na", "--api-key-file FILE, line 1: operator must be one of no, yes, got 'all'"),
        (b"[secret]\na", "--api-key-file FILE, line 1: a line that begins with [ must be like [priority-range=-2:5 p"),
        (b"[priority-tier=all]secret", "--api-key-file FILE, line 1: a line that begins with [ must be like [priority"),
        (b"[priority-tier=all priority-tier=all]\na", "--api-key-file FILE, line 1: a line that begins with [ must be"),
        (b"a\n[priority-range=0:5]\n# b\n[]\nc", "--api-key-file FILE, line 2: no key follows"),
        (b"a\n[priority-range=0:5]", "--api-key-file FILE, line 2: no key follows"),
        (
            b"secret\n[priority-range=0:5]\nsecret",
            "--api-key-file FILE, line 3: this key is also further up, in another",
        ),
    ],
)
def test_invalid_key_files_are_refused_without_showing_keys(
    configs: list[ServerConfig], tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    run = serve("--api-key-file", file)
    assert run.exit_code == 2
    assert run.stderr.startswith(f"error: {message.replace('FILE', str(file))}")
    assert "secr" not in run.output
    assert not configs


def test_key_settings_without_effect_are_refused(configs: list[ServerConfig], tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("[priority-tier=all]\nsecret\n")
    run = serve("--metrics-key-file", file)
    assert run.stderr == f"error: --metrics-key-file {file}: keys that open /metrics alone have no settings\n"
    run = serve("--api-key-file", file, "--api-key", "secret")
    assert run.stderr == f"error: --api-key-file {file} gives settings to a key that --api-key gives, too\n"
    # The settings need a key with the priority tier, which only this file has.
    assert serve("--api-key-file", file, "--priority-ttft-ms", 5).exit_code == 0
    file.write_text("secret\n")
    run = serve("--api-key-file", file, "--priority-ttft-ms", 5)
    assert run.stderr.startswith(
        "error: --priority-ttft-ms is for requests of service_tier priority: set --priority-tier"
    )
    assert len(configs) == 1


@pytest.mark.parametrize("key", ["", " key7", "key7\n", "\tkey7", "key7é", "key7\x00b"])
def test_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="api_key must") as refused:
        ServerConfig(api_keys=("right", key))
    assert "7" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "warns", "code"),
    [((), False, 0), (("--host", "localhost"), False, 0), (("--host", "0.0.0.0"), True, 2),
     (("--host", "0.0.0.0", "--api-key", "a"), False, 0), (("--host", "0.0.0.0", "--allow-no-key"), True, 0)],
)  # fmt: skip
def test_public_address_needs_a_key_or_an_explicit_flag(
    configs: list[ServerConfig], caplog: pytest.LogCaptureFixture, options: tuple[str, ...], warns: bool, code: int
) -> None:
    run = serve(*options)
    assert run.exit_code == code, run.output
    assert len(configs) == (code == 0)
    assert ("any machine that reaches 0.0.0.0 may use this server" in caplog.text + run.stderr) is warns


def test_hosts_and_origins_are_separated_by_commas_or_repeated(configs: list[ServerConfig]) -> None:
    run = serve("--allowed-hosts", "a.com, b", "--cors-origins", "http://a.com,http://b:3", "--cors-origins", "app://c")
    assert run.exit_code == 0, run.output
    (config,) = configs
    assert config.allowed_hosts == ("a.com", "b")
    assert config.cors_origins == ("http://a.com", "http://b:3", "app://c")
    run = serve("--allowed-hosts", "a,,b")
    assert run.stderr == "error: --allowed-hosts must be * or names like llm.example.com, without a port, got ''\n"


def test_key_file_marks_operators(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a\n[operator=yes priority-tier=all]\nb\n[operator=no]\nc\n")
    config = with_keys_of_files(ServerConfig(api_key_file=str(file)))
    rights = {key: config.rights_of(owner_of_key(key.encode())) for key in "abc"}
    assert {key: right.is_operator for key, right in rights.items()} == {"a": False, "b": True, "c": False}
    assert rights["b"].tier
