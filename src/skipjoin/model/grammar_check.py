from __future__ import annotations

import sys
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import Future
from pathlib import Path

import msgspec

from skipjoin.model import grammar_program as program
from skipjoin.model.fair_threads import FairThreads
from skipjoin.model.frame_process import ENDED, FrameProcess
from skipjoin.model.grammar_program import Vocabulary
from skipjoin.structured_output import GrammarError, StructuredOutput

_COMMAND = (sys.executable, "-m", program.__name__)
# Seconds after which a process that does not answer, such as a stopped one, is killed. Loading the vocabulary takes
# a few, and on a busy machine many.
_MAX_WAIT_S = 60.0
# Constraints whose outcome is remembered, of all clients.
_MAX_KNOWN = 1024
# Smaller vocabularies load within the first request.
_LARGE_VOCABULARY = 10_000
_LIMITS = {
    program.OUT_OF_TIME: f"takes more than {program.MAX_CPU_S * 1000:g} ms of processor time to compile",
    program.OUT_OF_MEMORY: f"needs more than {program.MAX_MEMORY_BYTES >> 20} MiB of memory to compile",
    program.TOO_DEEP: "is nested too deeply to compile",
    ENDED: "could not be compiled, because the compiler's process ended: try again",
}


class GrammarCheck:
    """Compiles constraints in a separate process, for clients in turn. Thread-safe.

    Outcomes are kept per client, because a fast one would reveal that another client uses the constraint.
    """

    def __init__(self, folder: str | Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocabulary = Vocabulary(str(folder), vocab_size, eos_token_ids)
        # One thread, because a single process compiles.
        self._threads = FairThreads(1)
        self._process = FrameProcess(_COMMAND, _MAX_WAIT_S)
        self._known: OrderedDict[tuple[str, StructuredOutput], str] = OrderedDict()
        self._known_lock = threading.Lock()
        self._lock = threading.Lock()
        weakref.finalize(self, self.close)

    def start(self) -> None:
        if self._vocabulary.size >= _LARGE_VOCABULARY:
            self._threads.submit("", self._start)

    def check(self, structured: StructuredOutput, client: str = "") -> None:
        """Compile a constraint, unless it is known; raise `GrammarError` beyond the limits. Releases the GIL."""
        self.submit(structured, client).result()

    def submit(self, structured: StructuredOutput, client: str = "") -> Future[None]:
        error = self._recall(structured, client)
        if error is None:
            return self._threads.submit(client, self._check, structured, client)
        future: Future[None] = Future()
        if error:
            future.set_exception(GrammarError(error))
        else:
            future.set_result(None)
        return future

    def _recall(self, structured: StructuredOutput, client: str) -> str | None:
        with self._known_lock:
            if (error := self._known.get((client, structured))) is not None:
                self._known.move_to_end((client, structured))
            return error

    def _check(self, structured: StructuredOutput, client: str) -> None:
        # An equal constraint may have been compiled while this one waited.
        if (error := self._recall(structured, client)) is None:
            with self._lock:
                error = self._error_of(structured)
            with self._known_lock:
                self._known[client, structured] = error
                if len(self._known) > _MAX_KNOWN:
                    self._known.popitem(last=False)
        if error:
            raise GrammarError(error)

    def _start(self) -> None:
        with self._lock:
            self._running()

    def close(self) -> None:
        if (process := self._process.process) is not None:
            process.kill()  # ends a check in progress
        self._threads.close()
        with self._lock:
            self._process.end()

    def _error_of(self, structured: StructuredOutput) -> str:
        content = msgspec.json.encode(structured)
        kind, said = self._ask(content)
        if kind == ENDED:  # killed from outside
            kind, said = self._ask(content)
        if kind == ENDED:
            raise GrammarError(_LIMITS[ENDED])
        if limit := _LIMITS.get(kind):
            return f"{limit}: simplify it"
        return said.decode()

    def _ask(self, content: bytes) -> tuple[int, bytes]:
        self._running()
        return self._process.ask(content)

    def _running(self) -> None:
        if (answer := self._process.start(msgspec.json.encode(self._vocabulary))) is None:
            return
        kind, said = answer
        if kind != program.GOOD:
            self._process.end()
            raise GrammarError(_LIMITS[ENDED] if kind == ENDED else said.decode())
