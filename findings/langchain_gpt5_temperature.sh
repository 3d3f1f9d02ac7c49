#!/usr/bin/env bash
# Finding: LangChain's ChatOpenAI drops the temperature if the name of the model begins with gpt-5, whatever the server is.
# Version: langchain-openai 1.7.4
# Guess: an explicit temperature is sent, or refused with an error, because a client cannot know which model a server of
#   its own base_url has under a name.
# What happens: temperature=0 is left out for gpt-5 and gpt-5-mini, without a warning. It is sent for gpt-5-chat and all
#   other names. top_p is sent for all of them.
# Why it matters: a server that offers a model under such a name, as a replacement of OpenAI's, samples at its default
#   temperature where greedy answers were asked for. Skipjoin cannot tell that from a request without a temperature.
source "$(dirname "$0")/support.bash"
packages langchain-openai==1.7.4
"$PYTHON" - <<'PY' | expect "gpt-5 {'top_p': 0.5}
gpt-5-mini {'top_p': 0.5}
gpt-5-chat {'temperature': 0.0, 'top_p': 0.5}
smollm2 {'temperature': 0.0, 'top_p': 0.5}"
from langchain_openai import ChatOpenAI

for name in ("gpt-5", "gpt-5-mini", "gpt-5-chat", "smollm2"):
    model = ChatOpenAI(model=name, temperature=0, top_p=0.5, api_key="x", base_url="http://127.0.0.1:1/v1")
    body = model._get_request_payload("hello")
    print(name, {field: body[field] for field in ("temperature", "top_p") if field in body})
PY
