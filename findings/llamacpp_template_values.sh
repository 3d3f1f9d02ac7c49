#!/usr/bin/env bash
# Finding: llama.cpp's chat templates count the bytes of a text, keep variables between the turns of a loop, and write
#   lists without brackets.
# Version: xllamacpp 2026.10.11549, gguf 0.19.0, Jinja2 3.1.6
# Guess: a template gives the prompt that Jinja2 gives, or is refused.
# What happens: `length` of "é日本" is 8 instead of 3, and its last character [-1] is empty. A variable that a loop's body
#   sets has its value of the turn before in the next one, where Jinja2 begins anew from the outer value. A list is
#   written as its elements, a dictionary and none as nothing, and `format` returns its text as it is. All are silent.
# Why it matters: The same file and messages give another prompt than under transformers, for which the model was
#   trained. Skipjoin renders templates of GGUF files with Jinja2.
source "$(dirname "$0")/support.bash"
packages xllamacpp==2026.10.11549 gguf==0.19.0 Jinja2==3.1.6
llamacpp_templates
"$PYTHON" - 2>/dev/null <<'PY' | expect "length: 3, 8
last character: o, 
counted in a loop: 111, 123
list: ['a', 'b'], ab
dictionary: {'a': 1}, 
format: a-3, %s-%d
none: None, "
import jinja2
from render import render

EXPRESSIONS = {
    "length": "{{ 'é日本' | length }}",
    "last character": "{{ 'hello'[-1] }}",
    "counted in a loop": "{% set n = 0 %}{% for message in messages %}{% set n = n + 1 %}{{ n }}{% endfor %}",
    "list": "{{ ['a', 'b'] }}",
    "dictionary": "{{ {'a': 1} }}",
    "format": "{{ '%s-%d' | format('a', 3) }}",
    "none": "{{ none }}",
}
MESSAGES = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
REST = "|{% for message in messages %}{{ message.content }}{% endfor %}"
for name, expression in EXPRESSIONS.items():
    wanted = jinja2.Environment().from_string(expression).render(messages=MESSAGES)
    print(f"{name}: {wanted}, {render(expression + REST, MESSAGES).rsplit('|', 1)[0]}", flush=True)
PY
