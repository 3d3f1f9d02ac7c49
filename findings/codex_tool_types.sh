#!/usr/bin/env bash
# Finding: Codex offers tools of the types namespace and web_search to every provider, whatever model it knows nothing of.
# Version: @openai/codex 0.171.0
# Guess: an agent offers a model that it does not know functions only, because the server of another provider has no web
#   search.
# What happens: of nine tools one is a namespace of functions, and one is a hosted web search. The rules come in two
#   messages of a developer, and the question is the second of two messages of the user.
# Why it matters: a server that refuses unknown types of tools runs no Codex, and neither does a chat template with strict
#   roles. Skipjoin names functions of a namespace NAMESPACE__NAME, leaves out hosted tools beside functions, and regroups
#   messages for such templates.
source "$(dirname "$0")/support.bash"
node_packages @openai/codex@0.171.0
recorder
mkdir -p "$work/home/.codex" "$work/project"
WORK=$work python3 - <<'PY' | expect "tools: 7 of function, 1 of namespace, 1 of web_search
roles: developer developer user user"
import os
import subprocess

from recorder import bodies, port

work = os.environ["WORK"]
provider = f'{{name="other", base_url="http://127.0.0.1:{port}/v1", wire_api="responses"}}'
command = [f"{work}/node_modules/.bin/codex", "exec", "--skip-git-repo-check", "-m", "unknown-model"]
command += ["-c", "model_provider=other", "-c", f"model_providers.other={provider}", "Say hello."]
place = {"cwd": f"{work}/project", "env": os.environ | {"HOME": f"{work}/home"}, "stdin": subprocess.DEVNULL}
subprocess.run(command, **place, capture_output=True, timeout=120, check=False)
types = [tool["type"] for tool in bodies[0]["tools"]]
print("tools:", ", ".join(f"{types.count(kind)} of {kind}" for kind in sorted(set(types))))
print("roles:", *(item["role"] for item in bodies[0]["input"]))
PY
