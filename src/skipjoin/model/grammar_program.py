"""Program that compiles grammars for `GrammarCheck`: frames on standard input, first a `Vocabulary`, then constraints.

Forks compile them under limits of CPU time, memory and stack, because some patterns take minutes, and deep rules
overflow the stack. The parent loads the vocabulary, which takes a second.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, NoReturn

import msgspec

from skipjoin.model.grammars import Grammars
from skipjoin.model.template_program import read_frame, write_frame
from skipjoin.model.tokenizer import load_tokenizer
from skipjoin.schemas.reasons import reason
from skipjoin.structured_output import GrammarError, StructuredOutput

try:
    import resource
except ImportError:  # not on Windows, where this program cannot run, but its constants are read
    resource = None  # type: ignore[assignment]

# CPU time of one grammar. A schema of 300 properties takes a third of it.
MAX_CPU_S = 0.1
# Memory that one grammar may add.
MAX_MEMORY_BYTES = 256 << 20
# Stack of the compiling process. That of an engine's threads is larger, so a grammar that passes cannot overflow it.
_MAX_STACK_BYTES = 1 << 20
_MAX_ERROR_CHARS = 500

# Kinds of answers: a grammar that compiles, one that does not, and limits that were reached.
GOOD, REJECTED, OUT_OF_TIME, OUT_OF_MEMORY, TOO_DEEP = range(5)
_LIMITS = (OUT_OF_TIME, OUT_OF_MEMORY, TOO_DEEP)


class Vocabulary(msgspec.Struct, frozen=True):
    folder: str
    size: int
    eos_token_ids: tuple[int, ...]


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the caller, which closes standard input
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(EOFError):
        _serve()


def _serve() -> None:
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    _, content = read_frame(requests)
    words = msgspec.json.decode(content, type=Vocabulary)
    grammars = Grammars(partial(load_tokenizer, words.folder), words.size, words.eos_token_ids)
    try:
        _ = grammars.vocabulary
    except GrammarError as error:
        write_frame(answers, REJECTED, _shown(error))
        return
    write_frame(answers, GOOD, b"")
    gc.freeze()  # a collection in a fork would copy all memory
    compiler = _Fork(grammars)
    while True:
        _, content = read_frame(requests)
        kind, said = compiler.ask(content)
        if kind in _LIMITS and compiler.asked > 1:  # earlier grammars may have left less memory
            compiler = _Fork(grammars)
            kind, said = compiler.ask(content)
        if kind in _LIMITS:
            compiler = _Fork(grammars)
        write_frame(answers, kind, said)


class _Fork:
    def __init__(self, grammars: Grammars) -> None:
        self.asked = 0
        reading, request = os.pipe()
        answer, writing = os.pipe()
        self._process = os.fork()
        if not self._process:
            os.close(request)
            os.close(answer)
            _compile_all(grammars, os.fdopen(reading, "rb"), os.fdopen(writing, "wb"))
        os.close(reading)
        os.close(writing)
        self._requests, self._answers = os.fdopen(request, "wb"), os.fdopen(answer, "rb")

    def ask(self, content: bytes) -> tuple[int, bytes]:
        """Return whether a grammar compiles. No grammar may follow one that reaches a limit."""
        self.asked += 1
        try:
            write_frame(self._requests, 0, content)
            return read_frame(self._answers)
        except (OSError, EOFError):
            _, status = os.waitpid(self._process, 0)
            for pipe in (self._requests, self._answers):
                with suppress(OSError):  # an unread frame is lost
                    pipe.close()
            return _kind_of(os.waitstatus_to_exitcode(status)), b""


def _kind_of(code: int) -> int:
    if code == -signal.SIGPROF:
        return OUT_OF_TIME
    return OUT_OF_MEMORY if code == -signal.SIGABRT else TOO_DEEP


def _compile_all(grammars: Grammars, requests: IO[bytes], answers: IO[bytes]) -> NoReturn:
    try:
        resource.setrlimit(resource.RLIMIT_STACK, (_MAX_STACK_BYTES, _MAX_STACK_BYTES))
        memory = _address_space() + MAX_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        while True:
            _, content = read_frame(requests)
            signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
            error = _error_of(grammars, msgspec.json.decode(content, type=StructuredOutput))
            signal.setitimer(signal.ITIMER_PROF, 0)
            write_frame(answers, REJECTED if error else GOOD, error)
    except MemoryError:
        os.abort()
    finally:
        os._exit(1)


def _error_of(grammars: Grammars, structured: StructuredOutput) -> bytes:
    try:
        matcher = grammars.compiled(structured)
        matcher.compute_bitmask()
        if matcher.is_stopped():
            raise GrammarError("allows no text" if not matcher.is_error() else reason(matcher.get_error()))
        return b""
    except GrammarError as error:
        return _shown(error)


def _address_space() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    return int(pages) * resource.getpagesize()


def _shown(error: Exception) -> bytes:
    return str(error)[:_MAX_ERROR_CHARS].encode("utf-8", "replace")


if __name__ == "__main__":
    main()
