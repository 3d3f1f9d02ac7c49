from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from skipjoin.config import ConfigError

# Large enough that the model and not Python decides the speed, small enough for a CPU.
CONTEXT = 1024
_VOCABULARY = 8192
_HIDDEN, _HEADS = 768, 12
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": _VOCABULARY,
    "hidden_size": _HIDDEN,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
NAME = "random-97m"
# The first start compiles operations of the CPU, which takes a minute where the compiler shares its cores.
_START_S, _STOP_S = 600.0, 30.0
_POLL_S = 0.1
# KV for more tokens than the demonstration's load ever holds, so that slots are the only limit.
_KV_GIB = 0.5
_READY = re.compile(r"^Ready: .* at (http://\S+) \(", re.MULTILINE)
_TAIL_LINES = 12


def write_model(folder: Path) -> Path:
    """Write the configuration and a tokenizer with one word per id, but no weights, and return their folder."""
    target = folder / NAME
    target.mkdir()
    (target / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(_VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.decoder = decoders.WordPiece(prefix="", cleanup=False)
    words.save(str(target / "tokenizer.json"))
    return target


class DemoServer:
    def __init__(self, model: Path, recipe: str, max_num_seqs: int) -> None:
        self.url = ""
        self._recipe = recipe
        self._command = [
            *(sys.executable, "-m", "skipjoin", "serve", str(model), "--load-format", "dummy", "--served-model-name"),
            *(NAME, "--recipe", recipe, "--max-num-seqs", str(max_num_seqs), "--max-model-len", str(CONTEXT)),
            *("--kv-cache-gib", str(_KV_GIB), "--swap-space", str(_KV_GIB), "--host", "127.0.0.1", "--port", "0"),
            # The costs that the first start would measure for 20 seconds are corrected by the steps that run.
            *("--profile", "off", "--batch-dir", "none"),
        ]

    def __enter__(self) -> Self:
        self._output = tempfile.TemporaryFile("w+", errors="replace")
        # In a group of its own, so that Ctrl-C reaches it through `__exit__` only.
        self._process = subprocess.Popen(
            self._command,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
            start_new_session=True,
        )
        try:
            self._wait()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _wait(self) -> None:
        end = time.monotonic() + _START_S
        while time.monotonic() < end:
            if (found := _READY.search(self._log())) is not None:
                self.url = found[1]
                return
            if self._process.poll() is not None:
                break
            time.sleep(_POLL_S)
        tail = "\n".join(self._log().splitlines()[-_TAIL_LINES:])
        raise ConfigError(f"the server of recipe {self._recipe} did not start:\n{tail}")

    def _log(self) -> str:
        self._output.seek(0)
        return self._output.read()

    def _stop(self) -> None:
        # The second signal skips the drain of requests that an interrupt has left.
        for _ in range(2):
            self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()
