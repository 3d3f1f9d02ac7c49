#!/usr/bin/env bash
# Finding: llguidance takes an escaped spelling of a named property for an additional property.
# Version: llguidance 1.9.1
# Guess: A property of the schema appears at most once, and its value follows its schema.
# What happens: The name `a`, written with a Unicode escape, counts as another name, whose value may be anything. A parser
# keeps the last value, which has another type than the schema says.
# Why it matters: An output that the grammar accepts does not validate. Skipjoin turns additional properties into those of
# a pattern, whose texts have one spelling.
source "$(dirname "$0")/support.bash"
packages llguidance==1.9.1
"$PYTHON" - <<'PY' | expect '{"a":1,"a":"x"} False
{"a":1,"\u0061":"x"} True'
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


schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
for text in ('{"a":1,"a":"x"}', '{"a":1,"\\u0061":"x"}'):
    print(text, accepts(schema, text))
PY
