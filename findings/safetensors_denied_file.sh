#!/usr/bin/env bash
# Finding: safetensors says of a file that the user may not read that there is none.
# Version: safetensors 0.8.0, numpy 2.4.6
# Guess: opening fails with PermissionError, as open() does, because the library maps the file itself.
# What happens: safe_open raises FileNotFoundError with "No such file or directory" and the path; open() raises
#   PermissionError.
# Why it matters: a service that runs as a user of its own often lacks the rights to a model, and its operator looks for
#   a wrong path instead. Skipjoin opens each file itself first.
source "$(dirname "$0")/support.bash"
packages safetensors==0.8.0 numpy==2.4.6
"$PYTHON" - <<'PY' | expect "open: PermissionError
safe_open: FileNotFoundError, No such file or directory"
import os
import tempfile

import numpy
from safetensors import safe_open
from safetensors.numpy import save_file

with tempfile.TemporaryDirectory() as folder:
    file = f"{folder}/model.safetensors"
    save_file({"a": numpy.zeros(4, numpy.float32)}, file)
    os.chmod(folder, 0o755)
    os.chmod(file, 0o000)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        open(file, "rb")
    except OSError as error:
        print("open:", type(error).__name__)
    try:
        safe_open(file, framework="np")
    except OSError as error:
        print(f"safe_open: {type(error).__name__}, {str(error).partition(':')[0]}")
    if is_root:
        os.seteuid(0)
PY
