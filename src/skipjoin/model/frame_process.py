from __future__ import annotations

import select
import subprocess
from collections.abc import Sequence
from contextlib import suppress

from skipjoin.model.template_program import read_frame, write_frame

# Kind of an answer: the process ended before it answered. The content is its exit code.
ENDED = -1


class FrameProcess:
    """Process that answers frames, and is replaced if it ends, or is stopped for `max_wait_s`. Not thread-safe."""

    def __init__(self, command: Sequence[str], max_wait_s: float) -> None:
        self._command, self.max_wait_s = command, max_wait_s
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, first: bytes) -> tuple[int, bytes] | None:
        """Return the process's answer to the first frame, or None if it runs already."""
        if self.process is not None and self.process.poll() is not None:  # killed while idle
            self.end()
        if self.process is not None:
            return None
        self.process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self.ask(first)

    def ask(self, content: bytes) -> tuple[int, bytes]:
        process = self.process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_frame(process.stdin, 0, content)
            waiting = select.poll()
            waiting.register(process.stdout.fileno(), select.POLLIN)
            if not waiting.poll(self.max_wait_s * 1000):
                process.kill()
            return read_frame(process.stdout)
        except (OSError, EOFError):
            return ENDED, str(self.end()).encode()

    def end(self) -> int:
        process, self.process = self.process, None
        if process is None:
            return 0
        process.kill()
        code = process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(OSError):  # an unread frame is lost
                pipe.close()
        return code
