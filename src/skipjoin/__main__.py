"""The command `skipjoin`. An interrupt while its modules are imported is no traceback either."""

import os
import signal
import sys

INTERRUPTED = 130


def main() -> None:
    # At once, because imports turn an exception that a handler raises into others, or lose it.
    is_heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_heeded:
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from skipjoin.cli import app  # noqa: PLC0415

    if is_heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app(prog_name="skipjoin")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
