from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import NoReturn

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from skipjoin.server.api.errors import ApiError, bad_request

FILE = "file"
# A form has a file, its purpose and its expiry.
_MAX_PARTS, _LONGEST_FIELD = 16, 1024
_LONGEST_NAME = 255
# The response reports an invalid form, so the parser must not log it.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


class Form:
    def __init__(self, content_type: str | None) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise bad_request("the body must be multipart/form-data, with the fields file and purpose")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._parts = 0
        self._name = ""
        self._header = self._content = b""
        self._disposition = ""
        self._value = bytearray()
        self._file: list[bytes] = []
        self._is_complete = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers,
                    "on_part_data": self._on_data,
                    "on_part_end": self._end,
                    "on_end": self._complete,
                },
            )
        except FormParserError:
            _refuse()

    async def file(self, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for chunk in body:
            if data := self._parse(chunk):
                yield data
        if not self._is_complete:
            raise bad_request("the body ends before its last part does")
        if self.filename is None:
            raise bad_request("file is missing: the form must have a part of that name", FILE)

    def _parse(self, chunk: bytes) -> bytes:
        if self._is_complete and chunk.strip(b"\r\n"):
            raise bad_request("the body goes on after its last part")
        try:
            self._parser.write(chunk)
        except FormParserError:
            _refuse()
        data, self._file = b"".join(self._file), []
        return data

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise bad_request(f"a form must have at most {_MAX_PARTS} parts")
        self._disposition, self._value = "", bytearray()

    # Headers and values may arrive in several calls.

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._content += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._content.decode("latin-1")
        self._header, self._content = b"", b""

    def _on_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name in self.fields or (self._name == FILE and self.filename is not None):
            raise bad_request(f"{self._name} must be given once", self._name)
        if self._name == FILE:
            self.filename = label(options.get(b"filename", b""))

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE:
            self._file.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > _LONGEST_FIELD:
            raise bad_request(f"{self._name} must have at most {_LONGEST_FIELD} bytes", self._name)

    def _end(self) -> None:
        if self._name != FILE:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _complete(self) -> None:
        self._is_complete = True


def label(name: bytes) -> str:
    shown = "".join(c for c in name.decode("utf-8", "replace") if c.isprintable())
    return shown[:_LONGEST_NAME] or "upload"


def too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"file must have at most {max_bytes} bytes", param=FILE)


def _refuse() -> NoReturn:
    raise bad_request("the body is not valid multipart/form-data") from None
