#!/usr/bin/env bash
# Finding: The response parser of transformers loses the text of an answer if white space stands between two calls, and raises an error for an answer that was cut off.
# Version: transformers 5.23.0
# Guess: With the response template of its own documentation, parse_response keeps the words before the calls, and returns what there is of an answer that ended at max_tokens.
# What happens: The line break between two calls is content of its own, which replaces the words before them and is then dropped as empty. A call that was cut off raises ValueError, and the words before it are lost with it.
# Why it matters: Both outputs are usual: models write calls on lines of their own, and answers end at max_tokens. Skipjoin uses the parser with text fields alone, joins what repeats, and reads calls itself.
source "$(dirname "$0")/support.bash"
packages transformers==5.23.0
"$PYTHON" - 2>/dev/null <<'PY' | expect "one call: 'Let me see.'
two calls: no content, 2 calls
cut off: ValueError"
from transformers.utils.chat_parsing import parse_response

TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}
call = '<tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>'
print("one call:", repr(parse_response(f"Let me see.{call}<|im_end|>", TEMPLATE, prefix="")["content"]))
two = parse_response(f"Let me see.{call}\n{call}<|im_end|>", TEMPLATE, prefix="")
print("two calls:", two.get("content", "no content") + ",", len(two["tool_calls"]), "calls")
try:
    print("cut off:", parse_response(f"Let me see.{call[:40]}", TEMPLATE, prefix=""))
except ValueError as error:
    print("cut off:", type(error).__name__)
PY
