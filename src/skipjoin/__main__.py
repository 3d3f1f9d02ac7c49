"""The command `skipjoin`. An interrupt while its modules are imported is no traceback either."""

import sys


def main() -> None:
    try:
        from skipjoin.cli import app  # noqa: PLC0415

        app(prog_name="skipjoin")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
