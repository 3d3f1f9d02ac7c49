"""Program that renders chat templates for `ChatTemplate`: frames on standard input, first the template.

It imports nothing of this package, to start faster. Templates are untrusted, so they run in Jinja's sandbox. Jinja
cannot bound the time of `'x' * 10**10`, but the kernel can.
"""

from __future__ import annotations

import json
import signal
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import IO, Any, NoReturn

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

# CPU time of one conversation. Templates of released models take less than a millisecond.
MAX_CPU_S = 0.5
# Address space of this process, of which the interpreter takes about 50 MiB.
MAX_MEMORY_BYTES = 512 << 20
# Text of one conversation: four times the default limit of a request body. The caller copies it while streams wait: 31
# MiB take 20 ms.
MAX_TEXT_BYTES = 16 << 20
# Characters of an error, since a template may raise one of any length.
MAX_ERROR_CHARS = 1000

# Kinds of answers: a text, a conversation that the template rejects, an exception, or a limit that was reached.
TEXT, REJECTED, FAILED, OUT_OF_MEMORY, TOO_LONG = range(5)
_HEAD = struct.Struct("<BQ")


def write_frame(file: IO[bytes], kind: int, content: bytes) -> None:
    file.write(_HEAD.pack(kind, len(content)))
    file.write(content)
    file.flush()


def read_frame(file: IO[bytes]) -> tuple[int, bytes]:
    kind, size = _HEAD.unpack(_read(file, _HEAD.size))
    return kind, _read(file, size)


def _read(file: IO[bytes], size: int) -> bytes:
    content = file.read(size)
    if len(content) < size:
        raise EOFError
    return content


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the caller, which closes standard input
    if resource is not None:
        with suppress(ValueError, OSError):  # a lower limit is set, or the system has none
            resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(EOFError):
        _serve(sys.stdin.buffer, sys.stdout.buffer)


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    templates: list[Template] = []

    def compile_it(source: str) -> str:
        environment = _environment()
        templates.append(environment.from_string(source))
        return json.dumps(sorted(meta.find_undeclared_variables(environment.parse(source))))

    _, content = read_frame(requests)
    write_frame(answers, *_limited(compile_it, content))
    while True:
        _, content = read_frame(requests)
        write_frame(answers, *_limited(templates[0].render, content))


def _limited(work: Callable[[Any], str], content: bytes) -> tuple[int, bytes]:
    _set_timer(MAX_CPU_S)
    try:
        text = work(json.loads(content)).encode()
        return (TEXT, text) if len(text) <= MAX_TEXT_BYTES else (TOO_LONG, b"")
    except TemplateError as error:
        return REJECTED, _shown(str(error))
    except MemoryError:
        return OUT_OF_MEMORY, b""
    except Exception as error:
        return FAILED, _shown(repr(error))
    finally:
        _set_timer(0)


def _set_timer(seconds: float) -> None:
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF at its end


def _shown(error: str) -> bytes:
    return error[:MAX_ERROR_CHARS].encode("utf-8", "replace")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationMarks]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


class _GenerationMarks(Extension):
    """Renders `{% generation %}`, which marks the assistant's words for training, as its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Replace Jinja's own filter, which escapes for HTML and would change the model's input."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


if __name__ == "__main__":
    main()
