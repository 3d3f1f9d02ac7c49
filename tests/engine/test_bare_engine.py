"""An engine in one process needs only torch and the packages of its model, for machines that run only GPU tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# Packages that only the server, ranks in other processes, or tests need.
OTHERS = (
    "aiohttp",
    "fastapi",
    "httptools",
    "hypothesis",
    "msgspec",
    "prometheus_client",
    "ray",
    "uvicorn",
    "uvloop",
    "zmq",
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
BLOCK = f"""
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OTHERS!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
"""
GENERATE = """
from skipjoin.engine.build import assemble
from skipjoin.config import EngineConfig
from skipjoin.core.events import Token
from skipjoin.sampling import SamplingParams
from skipjoin.engine.loop import EngineLoop

settings = dict(load_format="dummy", profile="off", device="cpu", threads=1, kv_cache_gib=0.01, swap_space_gib=0)
loop = EngineLoop(assemble(EngineConfig(model=sys.argv[1], **settings)))
loop.add(0, [1, 2, 3], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
tokens = []
while not loop.idle:
    tokens += [event.token for event in loop.step() if isinstance(event, Token)]
loop.close()
print(*tokens)
print(*[name for name in sys.modules if name == "triton" or "kernels" in name and "skipjoin" in name])
import skipjoin.llm, skipjoin.cli, skipjoin.sim.experiments.machines, skipjoin.engine.profiling.profiler
"""


def run(program: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCK + program, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_optional_packages_are_blocked() -> None:
    assert "No module named 'msgspec'" in run("import msgspec").stderr


def test_engine_generates_without_optional_packages_and_triton(tmp_path: Path) -> None:
    """Its process can import the modules of measurements, too."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    found = run(GENERATE, tmp_path)
    assert found.returncode == 0, found.stderr
    generated, kernels = found.stdout.splitlines()
    tokens = [int(token) for token in generated.split()]
    assert len(tokens) == 4
    assert all(0 <= token < CONFIG["vocab_size"] for token in tokens)
    assert not kernels


def test_conftest_needs_no_hypothesis() -> None:
    found = run(f"import runpy\nrunpy.run_path({str(Path(__file__).parents[1] / 'conftest.py')!r})")
    assert found.returncode == 0, found.stderr
