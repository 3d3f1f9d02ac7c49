"""A `skipjoin serve` of the built-in model in a process of its own, for the benchmarks of ALISE over HTTP."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import TracebackType

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

# Short steps that do not depend on a profile, and one core for the model: the other one is for server and client.
OPTIONS = ("--port", "0", "--profile", "off", "--kv-cache-gib", "0.5", "--swap-space", "0", "--threads", "1")


class Served:
    """The server, from the time that it is ready. errors: lines that it wrote to standard error."""

    def __init__(self, *options: str) -> None:
        command = [str(Path(sys.executable).with_name("skipjoin")), "serve", "tally", *OPTIONS, *options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.errors: list[str] = []
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()
        assert self._process.stdout is not None
        ready = self._process.stdout.readline()
        if not ready.startswith("Ready"):
            self._process.wait()
            raise RuntimeError(f"the server did not start: {''.join(self.errors)}")
        self.url = ready.split(" at ")[1].split()[0]

    def __enter__(self) -> Served:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal, and wait for the end."""
        self._process.send_signal(number)
        self.wait()

    def wait(self) -> int:
        """Wait for the end; the exit code."""
        code = self._process.wait(60)
        self._reader.join(10)
        return code

    def kill_engine(self) -> None:
        """End the engine process, as the kernel does when memory is short."""
        (engine,) = (one for one in psutil.Process(self._process.pid).children() if "engine" in " ".join(one.cmdline()))
        engine.kill()

    def numbers(self) -> Counter[str]:
        """All samples without buckets of `/metrics`, by name and label, classes of requests together."""
        found = Counter[str]()
        for family in text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text):
            for sample in family.samples:
                if "le" not in sample.labels:
                    labels = [value for label, value in sample.labels.items() if label != "class"]
                    found[" ".join([sample.name.removeprefix("skipjoin:"), *labels])] += sample.value
        return found

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self.errors.extend(self._process.stderr)
