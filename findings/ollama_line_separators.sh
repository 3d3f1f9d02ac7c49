#!/usr/bin/env bash
# Finding: Ollama's Python client ends a line of a stream also at U+2028, U+2029 and U+0085, which JSON allows in a
#   text.
# Version: ollama 0.6.3, httpx 0.28.1
# Guess: a stream of JSON lines is split at line feeds, so that a server may send any character but those unescaped.
# What happens: httpx's iter_lines splits as str.splitlines does. A text with such a character that is not escaped
#   fails with JSONDecodeError in the middle of a stream. Escaped, or without a stream, it is read.
# Why it matters: many encoders of JSON leave these characters as they are. An answer that has one ends in an error of
#   the client, although the server's log has none. Skipjoin sent them as they are, and escapes them now.
source "$(dirname "$0")/support.bash"
packages ollama==0.6.3 httpx==0.28.1
"$PYTHON" - <<'PY' | expect "unescaped in a stream: JSONDecodeError
escaped in a stream: 3 characters
unescaped without a stream: 3 characters"
import http.server
import json
import threading

import ollama

TEXT = "a\u2028b"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        line = {"model": "m", "message": {"role": "assistant", "content": TEXT}, "done": True}
        data = json.dumps(line, ensure_ascii=asked["model"] == "escaped").encode() + b"\n"
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = ollama.Client(f"http://127.0.0.1:{server.server_port}")
for model, streams in (("unescaped", True), ("escaped", True), ("unescaped", False)):
    try:
        found = client.chat(model, [{"role": "user", "content": "x"}], stream=streams)
        text = "".join(part.message.content for part in found) if streams else found.message.content
        outcome = f"{len(text)} characters"
    except ValueError as error:
        outcome = type(error).__name__
    print(f"{model} {'in' if streams else 'without'} a stream: {outcome}")
PY
