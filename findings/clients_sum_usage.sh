#!/usr/bin/env bash
# Finding: LangChain and Pydantic AI add up the usage of all chunks of a stream, so that a server which sends it with
#   each chunk seems to have computed many times its tokens.
# Version: langchain-openai 1.7.4, pydantic-ai-slim 2.68.0, openai 3.52.0
# Guess: the last usage counts, as in OpenAI's client, because each one is the total so far.
# What happens: for a prompt of 10 tokens and an answer of 4 in 4 chunks, both report 50 and 14. With the usage in the
#   last chunk only, all three report 10 and 4.
# Why it matters: vLLM sends it so with stream_options.continuous_usage_stats, and Skipjoin likewise. Costs, limits
#   and benchmarks based on these clients are then wrong by about the length of the answer. Skipjoin sends the usage
#   of each chunk only to who asks for it.
source "$(dirname "$0")/support.bash"
packages langchain-openai==1.7.4 "pydantic-ai-slim[openai]==2.68.0" openai==3.52.0
"$PYTHON" - <<'PY' | expect "in each chunk: OpenAI 10 + 4, LangChain 50 + 14, Pydantic AI 50 + 14
in the last chunk: OpenAI 10 + 4, LangChain 10 + 4, Pydantic AI 10 + 4"
import asyncio
import http.server
import json
import threading

from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

in_each = True


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for number in range(1, 6):
            is_last = number == 5
            choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": "stop" if number == 4 else None}
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
            if is_last:
                chunk["choices"] = []
            if is_last or in_each:
                done = min(number, 4)
                chunk["usage"] = {"prompt_tokens": 10, "completion_tokens": done, "total_tokens": 10 + done}
            self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
of = {"base_url": f"http://127.0.0.1:{server.server_port}/v1", "api_key": "none"}


def openai():
    client = OpenAI(**of)
    with client.chat.completions.stream(model="m", messages=[{"role": "user", "content": "x"}]) as stream:
        usage = stream.get_final_completion().usage
    return usage.prompt_tokens, usage.completion_tokens


def langchain():
    first, *others = ChatOpenAI(model="m", stream_usage=True, **of).stream("x")
    for chunk in others:
        first += chunk
    return first.usage_metadata["input_tokens"], first.usage_metadata["output_tokens"]


async def pydantic_ai():
    async with Agent(OpenAIChatModel("m", provider=OpenAIProvider(**of))).run_stream("x") as stream:
        await stream.get_output()
        return stream.usage.input_tokens, stream.usage.output_tokens


for in_each in (True, False):
    found = {"OpenAI": openai(), "LangChain": langchain(), "Pydantic AI": asyncio.run(pydantic_ai())}
    shown = ", ".join(f"{name} {prompt} + {output}" for name, (prompt, output) in found.items())
    print(f"in {'each' if in_each else 'the last'} chunk: {shown}")
PY
