#!/usr/bin/env bash
# Finding: The JSON schema that pydantic writes for a Decimal with a number of digits allows the text "hello".
# Version: pydantic 2.13.0, jsonschema 4.26.0, llguidance 1.9.1
# Guess: Decimal with max_digits=5 and decimal_places=2 has a pattern of such numbers, so that a validator refuses other
#   text, and whatever enforces the schema makes a model write a number.
# What happens: The first alternative of the pattern, \d{0,3}, may be empty and has no $, so any text matches that is
#   more than signs and points. Without bounds the pattern is right. Both begin with a look-ahead, which llguidance refuses:
#   a schema with a Decimal cannot be enforced at all, although numbers are its other alternative.
# Why it matters: Prices are Decimals. pydantic 2.12 and 2.13 write these patterns, 2.11 and 2.14 none. Skipjoin
#   enforces the numbers that the bounds mean in place of these patterns.
source "$(dirname "$0")/support.bash"
packages pydantic==2.13.0 jsonschema==4.26.0 llguidance==1.9.1
"$PYTHON" - <<'PY' | expect "{'max_digits': 5, 'decimal_places': 2}: 12.5 True, hello True, - False, look-around refused
{}: 12.5 True, hello False, - False, look-around refused"
import json
from decimal import Decimal
from typing import Annotated

from jsonschema import Draft202012Validator
from llguidance import LLMatcher
from pydantic import Field, TypeAdapter

for bounds in ({"max_digits": 5, "decimal_places": 2}, {}):
    schema = TypeAdapter(Annotated[Decimal, Field(**bounds)]).json_schema()
    valid = ", ".join(f"{text} {Draft202012Validator(schema).is_valid(text)}" for text in ("12.5", "hello", "-"))
    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    print(f"{bounds}: {valid}, look-around {'refused' if 'look-around' in error else 'accepted'}")
PY
