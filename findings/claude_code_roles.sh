#!/usr/bin/env bash
# Finding: Claude Code ends a conversation with a system message, and sends an effort and 32,000 tokens to every model.
# Version: @anthropic-ai/claude-code 2.1.197
# Guess: messages have the roles user and assistant, as the Messages API documents, and the system prompt is apart.
#   Options that only some models have are sent to those.
# What happens: with a model that it does not know, the last of its messages has the role system and follows the user's.
#   output_config.effort is high, thinking is adaptive, and max_tokens is 32,000.
# Why it matters: chat templates that want the system message first reject the prompt, and servers that check the effort or
#   the maximum against the model refuse the request. Skipjoin regroups messages for such templates, ignores an effort that
#   a template has no setting of, and lets the context end the answer.
source "$(dirname "$0")/support.bash"
node_packages @anthropic-ai/claude-code@2.1.197
node "$work/node_modules/@anthropic-ai/claude-code/install.cjs" >/dev/null
recorder
mkdir -p "$work/home" "$work/project"
WORK=$work python3 - <<'PY' | expect "roles: user system
effort high, thinking adaptive, max_tokens 32000"
import os
import subprocess

from recorder import bodies, port

work = os.environ["WORK"]
more = {"HOME": f"{work}/home", "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{port}", "ANTHROPIC_API_KEY": "x"}
more |= {"ANTHROPIC_MODEL": "unknown-model", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
kept = {name: value for name, value in os.environ.items() if not name.startswith(("ANTHROPIC", "CLAUDE"))}
place = {"cwd": f"{work}/project", "env": kept | more, "stdin": subprocess.DEVNULL}
command = [f"{work}/node_modules/.bin/claude", "-p", "Say hello."]
subprocess.run(command, **place, capture_output=True, timeout=120, check=False)
(body, *_) = (body for body in bodies if body.get("tools"))
print("roles:", *(message["role"] for message in body["messages"]))
effort, thinking = body["output_config"]["effort"], body["thinking"]["type"]
print(f"effort {effort}, thinking {thinking}, max_tokens {body['max_tokens']}")
PY
