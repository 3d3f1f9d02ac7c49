from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from skipjoin.model.ops import build

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
CHECK, OPERATIONS = Path(__file__).with_name("check_ops.cpp"), Path(build.__file__).parent


@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="needs g++-aarch64-linux-gnu")
def test_neon_is_right_and_batch_invariant(tmp_path):
    # Bits do not depend on the level, and the compiler takes half of the time.
    flags = [{"-O3": "-O1"}.get(flag, flag) for flag in build.FLAGS if flag != "-shared"]
    sources = [str(OPERATIONS / name) for name in build.SOURCES if name not in ("layer_ops.cpp", "paged_attention.cpp")]
    program = tmp_path / "check"
    command = [COMPILER, *flags, "-static", f"-I{OPERATIONS}", str(CHECK), *sources, "-o", str(program)]
    subprocess.run(command, check=True, timeout=280)
    if shutil.which(EMULATOR) is None:
        pytest.skip("compiled, but running it needs qemu-user")
    done = subprocess.run([EMULATOR, str(program)], capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout == "neon ok\n", done
