"""Program that compiles grammars for `GrammarCheck`, which starts it.

    python -m skipjoin.model.grammar_program

It reads frames from standard input and answers each on standard output: first a `Vocabulary`, then constraints. Each is
compiled in a fork of this process, whose CPU time and memory the kernel limits. A compiler cannot bound them: some
patterns take minutes, and deep rules overflow the stack.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from skipjoin.model.grammars import Grammars, reason
from skipjoin.model.template_program import read_frame, write_frame
from skipjoin.model.tokenizer import load_tokenizer
from skipjoin.structured_output import GrammarError, StructuredOutput

# CPU time of one grammar. A schema of 300 properties takes a third of it.
MAX_CPU_S = 0.1
# Memory that one grammar may add.
MAX_MEMORY_BYTES = 256 << 20
# Stack of the compiling process. That of an engine's threads is larger, so a grammar that passes cannot overflow it.
_MAX_STACK_BYTES = 1 << 20
_MAX_ERROR_CHARS = 500

# Kinds of answers: a grammar that compiles, one that does not, and limits that were reached.
GOOD, REJECTED, OUT_OF_TIME, OUT_OF_MEMORY, TOO_DEEP = range(5)
_KIND_OF_SIGNAL = {signal.SIGPROF: OUT_OF_TIME, signal.SIGABRT: OUT_OF_MEMORY}


class Vocabulary(msgspec.Struct, frozen=True):
    """Arguments of `Grammars`."""

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
    while True:
        _, content = read_frame(requests)
        write_frame(answers, *_in_fork(partial(_compile, grammars, content)))


def _compile(grammars: Grammars, content: bytes) -> bytes:
    """Compile a grammar and its first mask. Return why it is rejected; empty if it is not."""
    try:
        matcher = grammars.matcher(msgspec.json.decode(content, type=StructuredOutput))
        matcher.compute_bitmask()
        if matcher.is_stopped():
            raise GrammarError("allows no text" if not matcher.is_error() else reason(matcher.get_error()))
        return b""
    except GrammarError as error:
        return _shown(error)


def _in_fork(work: Callable[[], bytes]) -> tuple[int, bytes]:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _work_and_exit(work, writing)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code:
        return _KIND_OF_SIGNAL.get(signal.Signals(-code) if code < 0 else signal.SIGABRT, TOO_DEEP), b""
    return (REJECTED, said) if said else (GOOD, b"")


def _work_and_exit(work: Callable[[], bytes], writing: int) -> None:
    """Work within the limits, and end this process: the system kills it where it is when its time is up."""
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_STACK, (_MAX_STACK_BYTES, _MAX_STACK_BYTES))
        memory = _address_space() + MAX_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        os.write(writing, work())
        code = 0
    finally:
        os._exit(code)


def _address_space() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    return int(pages) * resource.getpagesize()


def _shown(error: Exception) -> bytes:
    return str(error)[:_MAX_ERROR_CHARS].encode("utf-8", "replace")


if __name__ == "__main__":
    main()
