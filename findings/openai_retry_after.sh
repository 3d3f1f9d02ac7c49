#!/usr/bin/env bash
# Finding: OpenAI's Python client gives up at once if a server asks it to wait longer than two minutes.
# Version: openai 3.52.0
# Guess: a client with retries left waits as long as Retry-After says, or at most as long as it is willing to, and then
#   tries again. Earlier versions replaced a wait that was too long by their own backoff.
# What happens: with Retry-After of 120 or less, it waits and sends the request again. With 121, it sends one request.
# Why it matters: an overloaded server that estimates its queue honestly turns waits into failures. Skipjoin's Retry-After
#   is at most 60 seconds, and a test holds the client to that.
source "$(dirname "$0")/support.bash"
packages openai==3.52.0
"$PYTHON" - <<'PY' | expect "Retry-After 1: 3 requests, waited 1 and 1 s
Retry-After 120: 3 requests, waited 120 and 120 s
Retry-After 121: 1 requests, waited  s"
import http.server
import threading
import time

import openai

requests, waits = [], []
time.sleep = waits.append


class Busy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        requests.append(self.path)
        self.send_response(429)
        self.send_header("retry-after", str(self.server.wait_s))
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Busy)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}", api_key="x", max_retries=2)
for server.wait_s in (1, 120, 121):
    requests.clear()
    waits.clear()
    try:
        client.models.list()
    except openai.RateLimitError:
        seconds = " and ".join(f"{wait:g}" for wait in waits)
        print(f"Retry-After {server.wait_s}: {len(requests)} requests, waited {seconds} s")
PY
