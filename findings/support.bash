# Sourced by each finding. Makes a temporary folder with a virtual environment.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# packages REQUIREMENT...: install them; "$PYTHON" then runs with them.
packages() {
  python3 -m venv "$work/venv"
  PYTHON=$work/venv/bin/python
  "$PYTHON" -m pip install --quiet --disable-pip-version-check "$@" 2>"$work/pip" || { cat "$work/pip" >&2; exit 1; }
}

# node_packages NAME@VERSION...: install them; node, run in "$work", then finds them.
node_packages() {
  (cd "$work" && npm init --yes && npm install --no-audit --no-fund "$@") >"$work/npm" 2>&1 || { cat "$work/npm" >&2; exit 1; }
}

# byte_tokens: let Python import `byte_tokens`, which has llguidance's `matcher(schema)` over a vocabulary of bytes, and
# `accepts(schema, text)`.
byte_tokens() {
  export PYTHONPATH=$work
  cat > "$work/byte_tokens.py" <<'PY'
import json

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper


class Bytes:
    bos_token_id, eos_token_id, special_token_ids = None, 256, [256]
    tokens = [*(bytes([byte]) for byte in range(256)), b"\xff<eos>"]

    def __call__(self, text):
        return list(text.encode() if isinstance(text, str) else text)


vocabulary = LLTokenizer(TokenizerWrapper(Bytes()), n_vocab=257, eos_token=[256])


def matcher(schema):
    return LLMatcher(vocabulary, LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0)


def accepts(schema, text):
    found = matcher(schema)
    return found.try_consume_tokens(list(text.encode())) == len(text.encode()) and found.is_accepting()
PY
}

# llamacpp_templates: let Python import `render`, which asks llama.cpp for the prompt of messages and tools under a
# chat template, in a GGUF file of a tiny random model.
llamacpp_templates() {
  export PYTHONPATH=$work
  cat > "$work/render.py" <<'PY'
import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import gguf
import numpy as np
import xllamacpp

WIDTH, VOCABULARY = 32, 259


def written(template):
    path = Path(tempfile.mkdtemp()) / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(WIDTH // 2)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))])
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([2, 3, 3, *[6] * 256])
    writer.add_chat_template(template)
    random = np.random.default_rng(1)
    shapes = {"token_embd": (VOCABULARY, WIDTH), "output": (VOCABULARY, WIDTH), "output_norm": (WIDTH,)}
    shapes |= {f"blk.0.{norm}": (WIDTH,) for norm in ("attn_norm", "ffn_norm")}
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes |= {f"blk.0.{part}": (WIDTH, WIDTH) for part in parts}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.normal(0, 0.3, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def prompt(template, messages):
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(written(template))
    parameters.n_ctx, parameters.n_parallel, parameters.warmup = 256, 1, False
    server = xllamacpp.Server(parameters)
    body = json.dumps({"messages": messages}).encode()
    asked = urllib.request.Request(
        f"{server.listening_address}/apply-template", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(asked) as answer:
        return json.load(answer)["prompt"]


def render(template, messages):
    """In a process of its own, so that a fresh library loads each file."""
    asked = json.dumps([template, messages])
    done = subprocess.run([sys.executable, __file__, asked], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    print(json.dumps(prompt(*json.loads(sys.argv[1]))), flush=True)
PY
}

# recorder: let Python import `recorder`, whose server on `port` refuses each POST and keeps its JSON in `bodies`.
recorder() {
  export PYTHONPATH=$work
  cat > "$work/recorder.py" <<'PY'
import http.server
import json
import threading

bodies = []


class Handler(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(400)
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "seen"}}')

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
port = server.server_port
threading.Thread(target=server.serve_forever, daemon=True).start()
PY
}

# COMMAND | expect TEXT: fail unless the output of the command is the text.
expect() {
  if diff -u <(printf '%s\n' "$1") - >"$work/diff"; then
    echo "as stated: $(basename "$0")"
  else
    echo "$(basename "$0") behaves otherwise now:" >&2
    cat "$work/diff" >&2
    return 1
  fi
}
