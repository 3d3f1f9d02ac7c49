"""Build the compiled operations that tests load, one after the other.

tests/conftest.py starts this program while one process imports everything, which leaves a core idle. A test that needs
a library waits until it is built.
"""

from __future__ import annotations

import contextlib
import subprocess

from amx_cases import TARGETS, compiled

from skipjoin.model.ops import build

if __name__ == "__main__":
    build.load_library()
    for path, (_, needs) in TARGETS.items():
        if build.cpu_features() >= needs:
            with contextlib.suppress(OSError, subprocess.SubprocessError):  # a test reports or skips it
                compiled(path)
