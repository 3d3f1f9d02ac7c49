"""Validation process: `python -m skipjoin.server.batches.line_check FILE RULES`.

RULES is `Rules` as JSON, and each line of the output a `Report`.
"""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec

from skipjoin.adapters import unknown_model
from skipjoin.server.batches.records import LineError, LinePlace

# Lines of one report, which the server reads in a millisecond.
CHUNK = 500
# Number of errors after which validation stops.
MAX_ERRORS = 100
LONGEST_ID = 512
# Lower priority than serving requests.
NICENESS = 10
_SHOWN = 80


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    endpoint: str
    max_lines: int
    max_line_bytes: int
    models: tuple[str, ...] = ()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    lines: list[LinePlace] = []
    errors: list[LineError] = []
    is_finished: bool = False


class LineFaultError(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


def reports(file: BinaryIO, rules: Rules) -> Iterator[Report]:
    """After an error, valid lines are no longer reported."""
    check, errors, places = _Check(rules), list[LineError](), list[LinePlace]()
    for number, offset, text in raw_lines(file, rules.max_line_bytes):
        is_blank = not text
        if is_blank and number - check.count <= rules.max_lines:
            continue
        if is_blank or check.count == rules.max_lines:
            message = f"line {number} is one too many: a batch must have at most {rules.max_lines} lines"
            errors.append(LineError(code="too_many_lines", message=message, line=number))
            break
        try:
            custom_id = check.line(number, text)
        except LineFaultError as fault:
            message = f"line {number}: {fault.message}"
            errors.append(LineError(code=fault.code, message=message, line=number, param=fault.param))
            if len(errors) == MAX_ERRORS:
                break
            continue
        places.append(LinePlace(number, custom_id, offset, len(text)))
        if len(places) == CHUNK and not errors:
            yield Report(lines=places)
            places = []
    if not check.count and not errors:
        errors.append(LineError(code="empty_file", message="the file has no lines"))
    yield Report(errors=errors, is_finished=True) if errors else Report(lines=places, is_finished=True)


def raw_lines(file: BinaryIO, max_line_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield number, offset and bytes of each line; long lines are cut."""
    number = offset = 0
    while line := file.readline(max_line_bytes + 2):
        number += 1
        start, size = offset, len(line)
        while not line.endswith(b"\n") and (rest := file.readline(1 << 20)):
            size += len(rest)
            if rest.endswith(b"\n"):
                break
        offset += size
        if number == 1 and line.startswith(b"\xef\xbb\xbf"):  # byte order mark of some editors
            line, start = line[3:], start + 3
        text = line.rstrip(b"\r\n")
        yield number, start, b"" if text.isspace() else text


class _Check:
    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._seen: dict[str, int] = {}  # line number by custom_id
        self.count = 0

    def line(self, number: int, text: bytes) -> str:
        self.count += 1
        if len(text) > self._rules.max_line_bytes:
            raise LineFaultError("line_too_long", f"a line must have at most {self._rules.max_line_bytes} bytes")
        line = _parsed(text)
        custom_id = self._id(number, line.get("custom_id"))
        if line.get("method") != "POST":
            raise LineFaultError("invalid_method", f"method must be POST, got {_short(line.get('method'))}", "method")
        if line.get("url") != self._rules.endpoint:
            message = f"url must be the batch's endpoint {self._rules.endpoint}, got {_short(line.get('url'))}"
            raise LineFaultError("invalid_url", message, "url")
        self._check_body(line.get("body"))
        return custom_id

    def _id(self, number: int, found: Any) -> str:
        if not isinstance(found, str) or not 1 <= len(found) <= LONGEST_ID or "\0" in found:
            message = f"custom_id must be a string of 1 to {LONGEST_ID} characters without NUL, got {_short(found)}"
            raise LineFaultError("invalid_custom_id", message, "custom_id")
        if (earlier := self._seen.setdefault(found, number)) != number:
            message = f"custom_id {_short(found)} is that of line {earlier}, too"
            raise LineFaultError("duplicate_custom_id", message, "custom_id")
        return found

    def _check_body(self, body: Any) -> None:
        if not isinstance(body, dict):
            raise LineFaultError("invalid_body", f"body must be an object, got {_short(body)}", "body")
        if body.get("stream"):
            raise LineFaultError(
                "stream_not_supported", "body.stream must be false or absent in a batch", "body.stream"
            )
        model = body.get("model")
        models = self._rules.models
        if model is not None and models and model not in models:
            raise LineFaultError("model_not_found", unknown_model(_short(model), models), "body.model")


def _parsed(text: bytes) -> dict[str, Any]:
    if text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise LineFaultError("invalid_json_line", "the file must be UTF-8, and begins with the mark of UTF-16")
    try:
        line = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineFaultError("invalid_json_line", f"it is not valid JSON: {error}") from None
    if not isinstance(line, dict):
        raise LineFaultError("invalid_json_line", f"it must be a JSON object, got {_short(line)}")
    return line


def _short(found: Any) -> str:
    if found is None:
        return "nothing"
    text = repr(found) if isinstance(found, str | int | float) else type(found).__name__
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def main(path: str, rules: str) -> None:
    os.nice(NICENESS)
    with open(path, "rb") as file:
        for report in reports(file, msgspec.json.decode(rules, type=Rules)):
            sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
