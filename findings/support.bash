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
