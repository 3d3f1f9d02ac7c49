#!/usr/bin/env bash
# Finding: llguidance enforces another integer than the constant of a schema from 2^53 on.
# Version: llguidance 1.9.1
# Guess: A constant is a text in the grammar, so any integer comes out as it is, or the schema is refused.
# What happens: Numbers become doubles. The only text of the constant 1234567890123456789 is 1234567890123456768.
# Why it matters: Ids of 64 bits in an enum come out as other ids, without an error. Skipjoin writes such numbers as
# rules of their texts.
source "$(dirname "$0")/support.bash"
packages llguidance==1.9.1
"$PYTHON" - <<'PY' | expect '1234567890123456789 False
1234567890123456768 True'
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


for text in ("1234567890123456789", "1234567890123456768"):
    print(text, accepts({"const": 1234567890123456789}, text))
PY
