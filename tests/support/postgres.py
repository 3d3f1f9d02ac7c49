"""A private PostgreSQL server in a temporary folder."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import asyncpg

USER = "skipjoin"

# User and group without rights, whatever their names.
_UNPRIVILEGED = 65534


def binaries() -> Path | None:
    """Return the folder of the newest initdb and postgres, or None if PostgreSQL is not installed."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    known = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    return max((path.parent for path in known), key=lambda path: float(path.parent.name), default=None)


class Postgres:
    """A running PostgreSQL server, which tests may stop and start to simulate a failure."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder = folder
        self._programs = programs
        self._process: subprocess.Popen[bytes] | None = None
        self._count = 0
        settings = ["--auth=trust", f"--username={USER}", "--no-sync", "--encoding=UTF8", "--no-locale"]
        self._run("initdb", "-D", str(folder / "data"), *settings)
        self.start()

    def start(self) -> None:
        """Start the server and wait until it accepts connections."""
        settings = ["listen_addresses=", f"unix_socket_directories={self.folder}", "fsync=off", "max_connections=50"]
        options = [part for setting in settings for part in ("-c", setting)]
        command = [*_unprivileged(), str(self._programs / "postgres"), "-D", str(self.folder / "data"), *options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 30
        while time.monotonic() < end:
            with suppress(OSError, asyncpg.PostgresError):
                return asyncio.run(self._execute("SELECT 1"))
            assert self._process.poll() is None, "PostgreSQL does not start"
            time.sleep(0.02)
        raise AssertionError("PostgreSQL does not answer")

    def stop(self) -> None:
        """Stop the server immediately, without closing its connections cleanly."""
        self._run("pg_ctl", "stop", "-D", str(self.folder / "data"), "-m", "immediate")
        self._process.wait(30)

    def new_database(self) -> str:
        self._count += 1
        name = f"test{self._count}"
        asyncio.run(self._execute(f"CREATE DATABASE {name}"))
        return f"postgresql://{USER}@/{name}?host={self.folder}"

    async def _execute(self, statement: str) -> None:
        connection = await asyncpg.connect(host=str(self.folder), user=USER, database="postgres", timeout=5)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    def _run(self, program: str, *args: str) -> None:
        command = [*_unprivileged(), str(self._programs / program), *args]
        subprocess.run(command, check=True, capture_output=True, cwd=self.folder)


def _unprivileged() -> list[str]:
    """Return a command prefix that drops root's privileges, because PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return []
    return ["setpriv", f"--reuid={_UNPRIVILEGED}", f"--regid={_UNPRIVILEGED}", "--clear-groups", "--"]


@contextmanager
def running() -> Iterator[Postgres | None]:
    """Run a server during the block; yield None if PostgreSQL is not installed."""
    programs = binaries()
    if programs is None:
        yield None
        return
    # The path of a socket has a maximum length, and the server's user must be able to reach it.
    with TemporaryDirectory(prefix="pg", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if os.geteuid() == 0:
            os.chown(folder, _UNPRIVILEGED, -1)
        server = Postgres(folder, programs)
        try:
            yield server
        finally:
            server.stop()
