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
