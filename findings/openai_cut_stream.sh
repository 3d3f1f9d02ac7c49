#!/usr/bin/env bash
# Finding: OpenAI's Python client takes a stream without [DONE] and without a finish_reason for a complete one.
# Version: openai 3.52.0
# Guess: a stream ends with [DONE], so one that ends without it raises an error.
# What happens: only the transport counts. If chunked encoding breaks off, the client raises APIConnectionError. If a proxy
#   ends the chunks properly, or the connection's end is the response's end, as with HTTP/1.0, the loop just ends.
# Why it matters: a cut answer looks like a short one. Skipjoin ends a failing stream with an error event, sends HTTP/1.1 in
#   chunks, and says that with HTTP/1.0 a client must look for [DONE].
source "$(dirname "$0")/support.bash"
packages openai==3.52.0
"$PYTHON" - <<'PY' | expect "chunks break off: 2 events, then APIConnectionError
chunks end: 2 events, finish_reason None
the connection ends: 2 events, finish_reason None"
import json
import socket
import threading

import openai

CHOICE = {"index": 0, "delta": {"content": "half"}, "finish_reason": None}
EVENT = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [CHOICE]}
DATA = 2 * (b"data: " + json.dumps(EVENT).encode() + b"\n\n")
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(DATA), DATA)
answers = {
    "chunks break off": CHUNKED,
    "chunks end": CHUNKED + b"0\r\n\r\n",
    "the connection ends": HEAD + b"connection: close\r\n\r\n" + DATA,
}


def serve(listener):
    for answer in answers.values():
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(answer)


listener = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=serve, args=(listener,), daemon=True).start()
for name in answers:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", api_key="x", max_retries=0)
    events = []
    try:
        for event in client.chat.completions.create(model="m", messages=[], stream=True):
            events.append(event)
        end = f", finish_reason {events[-1].choices[0].finish_reason}"
    except openai.APIConnectionError as error:
        end = f", then {type(error).__name__}"
    print(f"{name}: {len(events)} events{end}")
PY
