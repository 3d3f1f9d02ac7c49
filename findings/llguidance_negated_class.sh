#!/usr/bin/env bash
# Finding: In llguidance, a pattern that excludes the quote allows it in JSON strings.
# Version: llguidance 1.9.1
# Guess: The pattern ^[^"]$ allows one character that is not a quote, however the string is escaped.
# What happens: The escaped quote is accepted. Other excluded characters, such as a line break, are not.
# Why it matters: Such outputs do not validate against their schema. Skipjoin does not change patterns.
source "$(dirname "$0")/support.bash"
packages llguidance==1.9.1
"$PYTHON" - <<'PY' | expect 'quote True
line break False
letter True'
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


for name, char in (("quote", '"'), ("line break", "\n"), ("letter", "x")):
    print(name, accepts({"type": "string", "pattern": '^[^"\n]$'}, json.dumps(char)))
PY
