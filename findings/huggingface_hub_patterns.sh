#!/usr/bin/env bash
# Finding: in patterns of huggingface_hub's downloads, * also stands for slashes, so that *.safetensors fetches weights
#   of subfolders.
# Version: huggingface_hub 2.4.0
# Guess: as in a shell or in .gitignore with a leading slash, a pattern for the top of a repository names no files below.
# What happens: names are compared whole by fnmatch. *.safetensors matches original/model.safetensors and
#   onnx/model.safetensors; model.safetensors matches only the file at the top; */*.safetensors among the patterns to
#   ignore leaves out every subfolder, however deep.
# Why it matters: repositories such as those of gpt-oss have all weights again in a folder `original`, and others have
#   them as ONNX, so that a program downloads tens of gigabytes twice. Skipjoin first fetches small files, and then the
#   weights that the index names.
source "$(dirname "$0")/support.bash"
packages huggingface_hub==2.4.0
"$PYTHON" - <<'PY' | expect "*.safetensors: model.safetensors original/model.safetensors onnx/deep/model.safetensors
model.safetensors: model.safetensors
*.safetensors without */*.safetensors: model.safetensors"
from huggingface_hub.utils import filter_repo_objects

FILES = ["model.safetensors", "original/model.safetensors", "onnx/deep/model.safetensors", "README.md"]
for pattern in ("*.safetensors", "model.safetensors"):
    print(f"{pattern}:", *filter_repo_objects(FILES, allow_patterns=[pattern]))
kept = filter_repo_objects(FILES, allow_patterns=["*.safetensors"], ignore_patterns=["*/*.safetensors"])
print("*.safetensors without */*.safetensors:", *kept)
PY
