#!/usr/bin/env bash
# Finding: LangChain's ChatOpenAI does not see an overflow of the context in an error with the code for it.
# Version: langchain-openai 1.7.4, langchain-core 1.8.3, openai 3.57.0
# Guess: it raises ContextOverflowError for OpenAI's own code, since it looks for that code.
# What happens: it looks for the code in the text of openai's exception, which holds only the message in openai 3.57.
#   The first two errors below are plain bad requests; the last two, without a code, are overflows by their words.
# Why it matters: agents that shorten their history on ContextOverflowError end instead. Skipjoin's message has OpenAI's
#   words, which LiteLLM knows, and "prompt is too long", which LangChain knows.
source "$(dirname "$0")/support.bash"
packages langchain-openai==1.7.4 langchain-core==1.8.3 openai==3.57.0
"$PYTHON" - <<'PY' | expect "context_length_exceeded False This model's maximum context length is 8192 tokens.
context_length_exceeded False Too many tokens.
None True The prompt is too long.
None True Input tokens exceed the configured limit of 8192 tokens."
import httpx
from langchain_core.exceptions import ContextOverflowError
from langchain_openai import ChatOpenAI

CODE = "context_length_exceeded"
for code, message in (
    (CODE, "This model's maximum context length is 8192 tokens."),
    (CODE, "Too many tokens."),
    (None, "The prompt is too long."),
    (None, "Input tokens exceed the configured limit of 8192 tokens."),
):
    error = {"message": message, "type": "invalid_request_error", "param": "messages", "code": code}
    answer = httpx.MockTransport(lambda _, error=error: httpx.Response(400, json={"error": error}))
    model = ChatOpenAI(model="m", api_key="x", http_client=httpx.Client(transport=answer))
    try:
        model.invoke("hello")
    except Exception as raised:
        print(raised.code, isinstance(raised, ContextOverflowError), message)
PY
