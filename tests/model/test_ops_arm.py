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
    command = [COMPILER, *flags, f"-I{OPERATIONS}", str(CHECK), *sources]
    if shutil.which(EMULATOR) is None:
        subprocess.run([*command, "-fsyntax-only"], check=True, timeout=280)
        pytest.skip("the types are right, but running it needs qemu-user")
    subprocess.run([*command, "-static", "-o", str(program)], check=True, timeout=280)
    done = subprocess.run([EMULATOR, str(program)], capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout == "neon ok\n", done
