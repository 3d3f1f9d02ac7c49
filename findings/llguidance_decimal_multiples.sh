#!/usr/bin/env bash
# Finding: llguidance finds no multiple of 0.1 from 0.3 to 0.3.
# Version: llguidance 1.9.1
# Guess: Multiples of decimal numbers are exact, because the grammar computes with their digits.
# What happens: The bounds are compared in doubles, where three times 0.1 is more than 0.3, so the schema counts as unsatisfiable.
# Why it matters: Prices and percentages with bounds are refused. Skipjoin writes multiples with bounds as rules of their texts.
source "$(dirname "$0")/support.bash"
packages llguidance==1.9.1
"$PYTHON" - <<'PY' | expect 'Unsatisfiable schema: range [0.30000000000000004, 0.2] does not contain a multiple of 0.1'
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


print(matcher({"type": "number", "minimum": 0.3, "maximum": 0.3, "multipleOf": 0.1}).get_error())
PY
