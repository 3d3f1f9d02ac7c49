#!/usr/bin/env bash
# Finding: LiteLLM recognizes a prompt that is too long by words in the error's message, and not by OpenAI's code.
# Version: litellm 1.110.2
# Guess: `code: "context_length_exceeded"` of an OpenAI-compatible server becomes ContextWindowExceededError, on which
#   callers shorten the prompt or choose a model with a larger context.
# What happens: the code alone becomes BadRequestError. OpenAI's sentence alone, without a code, becomes
#   ContextWindowExceededError, and so does any message that contains "prompt is too long".
# Why it matters: a server that words its errors in its own way loses fallbacks and compaction in everything built on
#   LiteLLM. Skipjoin's message begins with OpenAI's sentence, and its own bound and remedy follow.
source "$(dirname "$0")/support.bash"
packages litellm==1.110.2
LITELLM_LOCAL_MODEL_COST_MAP=True "$PYTHON" - 2>/dev/null <<'PY' | expect "the code alone: BadRequestError
OpenAI's sentence alone: ContextWindowExceededError
three words: ContextWindowExceededError"
import http.server
import json
import threading

import litellm

litellm.suppress_debug_info = True
errors = {
    "the code alone": ("the prompt has 9000 tokens, and this model reads 4096", "context_length_exceeded"),
    "OpenAI's sentence alone": ("This model's maximum context length is 4096 tokens.", None),
    "three words": ("the title of the prompt is too long for a label", None),
}


class Refusing(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        message, code = self.server.error
        error = {"message": message, "type": "invalid_request_error", "param": "messages", "code": code}
        body = json.dumps({"error": error}, separators=(",", ":")).encode()
        self.send_response(400)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
for name, server.error in errors.items():
    try:
        litellm.completion("openai/m", [{"role": "user", "content": "x"}], api_base=url, api_key="x", num_retries=0)
    except litellm.BadRequestError as error:
        print(f"{name}: {type(error).__name__}")
PY
