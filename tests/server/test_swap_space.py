from __future__ import annotations

import httpx
import pytest
import tiny_model as tiny
from forked_servers import ForkedServer


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of serve.py for a small model with random weights on a free port."""
    folder = tiny.write_model(tmp_path_factory.mktemp("model"))
    options = ["--port", "0", "--device", "cpu", "--profile", "off", "--threads", "1", "--kv-cache-gib", "0.01"]
    return ["command", "serve", str(folder), *options]


def test_startup_line_and_metrics_report_the_cpu_pool(command: list[str]) -> None:
    options = ["--swap-space", "0.02", "--swap-dtype", "int8", "--dtype", "bfloat16"]
    server = ForkedServer([*command, *options])
    with server.stdout, server.stderr:
        try:
            ready = server.stdout.readline()
            words = ready.split()
            device, cpu = (int(words[words.index(word) - 1]) for word in ("KV", "in"))
            # The CPU pool is twice as large, and its blocks take five eighths of a device block.
            assert cpu == pytest.approx(2 * device / 0.625, abs=3), ready
            assert " in CPU memory as int8, " in ready
            text = httpx.get(f"{ready.split(' at ')[1].split()[0]}/metrics").text
        finally:
            server.terminate()
            server.wait(20)
    (line,) = (line for line in text.splitlines() if line.startswith("skipjoin:cache_config_info"))
    assert f'num_cpu_blocks="{cpu}"' in line
    assert f'num_gpu_blocks="{device}"' in line
    assert 'swap_dtype="int8"' in line
