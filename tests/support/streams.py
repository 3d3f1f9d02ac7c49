"""A streamed answer that a thread reads."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any

import httpx


class Stream(threading.Thread):
    """Thread that reads the events of a streamed answer. `begun` is set by the first one, and at the end."""

    def __init__(self, url: str, body: dict[str, Any], timeout_s: float = 60.0) -> None:
        super().__init__(daemon=True)
        self.lines: list[str] = []
        self.begun = threading.Event()
        self._url, self._body, self._timeout_s = url, body | {"stream": True}, timeout_s
        self.start()

    def run(self) -> None:
        with (
            contextlib.suppress(httpx.TransportError),  # the server may be killed
            httpx.stream("POST", self._url, json=self._body, timeout=self._timeout_s) as response,
        ):
            for line in response.iter_lines():
                if line:
                    self.lines.append(line.removeprefix("data: "))
                    self.begun.set()
        self.begun.set()

    def events(self) -> list[Any]:
        """Return the events so far, without the mark of the end."""
        return [json.loads(line) for line in self.lines[:] if line != "[DONE]"]

    def last(self) -> Any:
        """Wait for the end and return the last event, or the mark of the end."""
        self.join(self._timeout_s)
        assert not self.is_alive(), "a stream does not finish"
        return self.lines[-1] if self.lines[-1] == "[DONE]" else json.loads(self.lines[-1])
