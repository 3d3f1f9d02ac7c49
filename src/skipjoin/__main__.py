"""The command `skipjoin`. An interrupt while its modules are imported is no traceback either."""

import errno
import io
import os
import signal
import sys

FAILED, INTERRUPTED = 1, 130
STDERR = 2


def main() -> None:
    _prepare_streams()
    # At once, because imports turn an exception that a handler raises into others, or lose it.
    is_heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heeded:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from skipjoin.cli import app  # noqa: PLC0415

    if is_heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        try:
            app(prog_name="skipjoin")
        finally:
            # Here, because the interpreter would report an error of its own flush as one that it ignores.
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT):
            raise
        sys.stdout = None
        if error.errno != errno.EPIPE:  # as after `skipjoin list | head -1`
            print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(FAILED)


def _prepare_streams() -> None:
    """Let closed standard streams, whose numbers others would take, lead nowhere, and replace unknown characters."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(number, True)
    os.close(number)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    main()
