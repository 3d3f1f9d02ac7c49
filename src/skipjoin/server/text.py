"""One output's text as its tokens come: complete characters only, and cut where a stop string begins."""

from __future__ import annotations

from collections.abc import Sequence

from skipjoin.model.tokenizer import Detokenizer, Tokenizer


class OutputText:
    """Text that grows one token at a time.

    What `add` and `finish` return, joined, is the output's text up to the first stop string; text that may turn
    out to begin a stop string is held back until that is known. Once `stopped`, nothing more comes.

    stop: strings that end the output. keep_stop: leave the stop string in the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        *,
        keep_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens)
        self._stop = tuple(stop)
        self._keep_stop = keep_stop
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that is certain now that `token` has come; may be empty."""
        return self._release(self._detokenizer.add(token)) if not self.stopped else ""

    def finish(self) -> str:
        """What was held back, at the end of the output."""
        if self.stopped:
            return ""
        text = self._release(self._detokenizer.finish())
        text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        if not self._stop:
            return text
        text = self._held + text
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            # The earliest stop string wins; of several that begin there, the shortest was complete first.
            at, stop = min(found, key=lambda item: (item[0], len(item[1])))
            self.stopped = True
            self._held = ""
            return text[: at + len(stop) if self._keep_stop else at]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, without being all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
