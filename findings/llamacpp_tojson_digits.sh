#!/usr/bin/env bash
# Finding: llama.cpp's chat templates write numbers of tool calls and tools with six significant digits.
# Version: xllamacpp 2026.10.11549, gguf 0.19.0, Jinja2 3.1.6
# Guess: `tojson` gives the shortest text that reads back as the same number, as Python's json does for transformers.
# What happens: 48.85837009 is written as 48.8584, 1234567.5 as 1.23457e+06, and 1.0 as 1. Integers keep all digits.
# Why it matters: The model reads the arguments of its own earlier calls with other values, such as a place 3 m away or
#   an amount that is 2.5 less, and repeats them. Skipjoin renders templates of GGUF files with Jinja2 and json.
source "$(dirname "$0")/support.bash"
packages xllamacpp==2026.10.11549 gguf==0.19.0 Jinja2==3.1.6
llamacpp_templates
"$PYTHON" - 2>/dev/null <<'PY' | expect '{"latitude": 48.85837009, "amount": 1234567.5, "share": 1.0, "id": 9007199254740993}
{"latitude": 48.8584, "amount": 1.23457e+06, "share": 1, "id": 9007199254740993}'
import json

import jinja2
from render import render

TEMPLATE = """{%- for message in messages %}
{%- if message.tool_calls %}{{ message.tool_calls[0].function.arguments | tojson }}
{%- else %}{{ message.content }}{%- endif %}{%- endfor %}"""
ARGUMENTS = {"latitude": 48.85837009, "amount": 1234567.5, "share": 1.0, "id": 9007199254740993}


def messages(arguments):
    call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": arguments}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [{"role": "user", "content": ""}, asked, {"role": "tool", "tool_call_id": "123456789", "content": ""}]


environment = jinja2.Environment()
environment.filters["tojson"] = lambda value: json.dumps(value)
print(environment.from_string(TEMPLATE).render(messages=messages(ARGUMENTS)), flush=True)
print(render(TEMPLATE, messages(json.dumps(ARGUMENTS))))
PY
