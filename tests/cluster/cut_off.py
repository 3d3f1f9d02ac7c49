"""A model over two machines, one of which is cut off while requests stream: `make test-cluster`.

python cut_off.py [forgets]: Ray takes the machine for alive all the time, as it does for a minute; or it soon gives it
up, and does not take it back when it is there again.

The machines are network namespaces of this one, joined by a cable that can be pulled. The first has Ray's head, the
server and room for the whole model; the second has one stage of it at first. Needs root, util-linux and iproute2. The
exit code is 0 if all is well, 1 if not, 77 where something is missing.

All of it runs in a process namespace of its own, which takes everything with it when it ends.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

SKIPPED = 77
# Of the range that is set aside for tests of networks.
HERE, THERE, RAY_PORT, HTTP_PORT = "198.18.0.1", "198.18.0.2", 6399, 8123
RAY = f"{HERE}:{RAY_PORT}"
# Limits of what is tested, in seconds: from the cut until the engine knows, from then until requests go on, and from
# the cut until the old rank on the machine that was cut off has ended.
NOTICE_S, REBUILD_S, STALE_S = 8.0, 10.0, 10.0
# Longest that anything else may take to start, and to end when told to.
START_S, END_S = 90.0, 20.0
# With these settings Ray gives a machine up after some six seconds, by default after a minute or more.
FORGETS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
# So many characters of each stream are there when the cable is pulled.
BEGUN = 40
# Prompts that the built-in model answers at length, greedy and seeded.
BODIES: list[dict[str, Any]] = [
    {"prompt": f"Count from {first} to 99\n", "max_tokens": 900, "ignore_eos": True, **sampling}
    for first in (1, 7, 30)
    for sampling in ({"temperature": 0}, {"temperature": 1.0, "seed": 5})
]
# What takes one CPU of the first machine while the ranks are placed, so that one of them goes to the other.
HOLD = """
import ray, sys
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
here = ray.get_runtime_context().get_node_id()
class Holder:
    def ready(self): return True
place = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False)
holder = ray.remote(num_cpus=1)(Holder).options(scheduling_strategy=place).remote()
ray.get(holder.ready.remote())
print("held", flush=True)
sys.stdin.read()
"""


def main() -> int:
    """The exit code."""
    forgets = sys.argv[1:2] == ["forgets"]
    if sys.argv[-1] == "inside":
        return Rehearsal(Path(os.environ["SKIPJOIN_REHEARSAL"]), forgets).run()
    if lacks := _lacks():
        print(f"skipped: {lacks}")
        return SKIPPED
    folder = Path(tempfile.mkdtemp(prefix="skipjoin-cut-off-"))
    try:
        inside = [*_namespaces(), sys.executable, __file__, *sys.argv[1:], "inside"]
        environment = os.environ | _environment(folder) | (FORGETS if forgets else {})
        code = subprocess.run(inside, env=environment, check=False).returncode
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if left := _left(folder):
        print(f"left behind: {', '.join(left)}")
        return 1
    print("all of it is gone again")
    return code


def _namespaces() -> list[str]:
    return ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]


def _lacks() -> str | None:
    """What this test needs and this machine has not."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    for program in ("ip", "unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"{program} is not installed (iproute2 and util-linux have it)"
    try:
        import ray  # noqa: F401, PLC0415 (optional)
    except ImportError:
        return "Ray is not installed"
    cable = "ip link add sj-port type veth peer name sj-there && ip link add sj-switch type bridge"
    tried = subprocess.run([*_namespaces(), "sh", "-c", cable], capture_output=True, text=True, check=False)
    return f"namespaces cannot be made here: {tried.stderr.strip()}" if tried.returncode else None


def _environment(folder: Path) -> dict[str, str]:
    return {
        "SKIPJOIN_REHEARSAL": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",
    }


def _left(folder: Path) -> list[str]:
    """What the rehearsal has left on this machine. Its networks end with its processes."""
    found = [str(folder)] if folder.exists() else []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get("SKIPJOIN_REHEARSAL") == str(folder)
        except (psutil.Error, OSError):
            continue
        if ours:
            found.append(f"process {process.pid} {process.name()}")
    return found


class Rehearsal:
    """All that happens inside. folder: for everybody's files. forgets: whether Ray gives the second machine up."""

    def __init__(self, folder: Path, forgets: bool) -> None:
        self.folder, self.forgets = folder, forgets
        self.began = time.monotonic()
        self.url = f"http://{HERE}:{HTTP_PORT}"

    def run(self) -> int:
        """The exit code."""
        try:
            self._lay_cable()
            with self._cluster() as second, self._server() as server:
                self._rehearse(server, second)
        except Exception as error:
            self.say(f"FAILED: {type(error).__name__}: {error}")
            for log in sorted(self.folder.glob("*.log")):
                print(f"--- {log.name}\n{log.read_text()[-4000:]}")
            return 1
        self.say("a machine was cut off in the middle of streams, and nobody noticed but the log: all is well")
        return 0

    def say(self, text: str) -> None:
        """Tell a step, with the seconds since the beginning."""
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)

    # -- what happens -----------------------------------------------------------------------------------------

    def _rehearse(self, server: Process, second: Process) -> None:
        undisturbed = self._stream_all()
        self.say(f"{len(BODIES)} streams, undisturbed: {sum(map(len, undisturbed))} characters")
        assert len(self._ranks(THERE)) == 1, f"the second machine should have one rank: {self._ranks(THERE)}"
        self._cut_in_mid_stream(server, undisturbed)
        self._plug(True)
        self.say("the cable is back")
        if self.forgets:
            _until(lambda: not second.runs(), START_S, "Ray on the second machine ends")
            self.say("Ray on the second machine has ended: it was given up")
        assert self._stream_all() == undisturbed, "with the cable back, streams differ"
        self.say("with the cable back, streams are the same")
        assert second.runs() != self.forgets
        starts = len(server.lines("restarting all ranks"))
        self._plug(False)
        assert self._stream_all() == undisturbed, "without the second machine, streams differ"
        assert len(server.lines("restarting all ranks")) == starts, "ranks were started anew without need"
        self._plug(True)
        self.say("cut off again, where it has no rank: nothing happens")

    def _cut_in_mid_stream(self, server: Process, expected: list[str]) -> None:
        """Pull the cable, and follow what comes of it until the streams have ended."""
        streams = [Stream(self.url, body) for body in BODIES]
        _until(lambda: all(len(stream.text) > BEGUN for stream in streams), START_S, "streams begin")
        self._plug(False)
        cut = time.monotonic()
        there = [len(stream.text) for stream in streams]
        ended = sum(not stream.is_alive() for stream in streams)
        self.say(f"the cable is pulled; of the streams {sum(there)} characters are there, {ended} have ended")
        assert ended == 0, "the streams ended before the cable was pulled"
        _until(lambda: bool(server.lines("restarting all ranks")), START_S, "the engine notices")
        noticed = time.monotonic()
        self.say(f"the engine knows after {noticed - cut:.1f} s: {server.lines('restarting all ranks')[-1]}")
        _until(lambda: not self._ranks(THERE), START_S, "the old rank ends")
        gone = time.monotonic()
        self.say(f"the old rank on the second machine has ended, {gone - cut:.1f} s after the cut")
        _until(lambda: bool(server.lines("are back")), START_S, "the ranks are back")
        back = time.monotonic()
        self.say(f"all ranks run on the first machine, {back - noticed:.1f} s later")
        found = [stream.result() for stream in streams]
        assert found == expected, "streams differ after the cut"
        self.say(f"all streams have ended, as if nothing had happened, {time.monotonic() - cut:.1f} s after the cut")
        assert len(self._ranks(HERE)) == 2
        assert len(server.lines("restarting all ranks")) == 1, (
            f"{server.count('restarting all ranks')} starts were needed"
        )
        assert noticed - cut < NOTICE_S, f"it took {noticed - cut:.1f} s to notice"
        assert gone - cut < STALE_S, f"it took {gone - cut:.1f} s until the old rank ended"
        assert back - noticed < REBUILD_S, f"it took {back - noticed:.1f} s to rebuild"

    def _stream_all(self) -> list[str]:
        return [stream.result() for stream in [Stream(self.url, body) for body in BODIES]]

    # -- the machines -----------------------------------------------------------------------------------------

    def _lay_cable(self) -> None:
        """From a switch on the first machine to the second: either side keeps its address while the cable is out."""
        self._there = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        own = os.readlink("/proc/self/ns/net")
        _until(lambda: os.readlink(f"/proc/{self._there.pid}/ns/net") != own, 5, "a network of its own")
        for command in (
            "ip link set lo up",
            "ip link add sj-switch type bridge",
            f"ip addr add {HERE}/24 dev sj-switch",
            "ip link set sj-switch up",
            f"ip link add sj-port type veth peer name sj-there netns {self._there.pid}",
            "ip link set sj-port master sj-switch",
        ):
            subprocess.run(command.split(), check=True)
        for command in ("ip link set lo up", f"ip addr add {THERE}/24 dev sj-there", "ip link set sj-there up"):
            subprocess.run([*self._over_there(), *command.split()], check=True)
        self._plug(True)
        self.say("two networks, one cable")

    def _plug(self, connected: bool) -> None:
        subprocess.run(["ip", "link", "set", "sj-port", "up" if connected else "down"], check=True)

    def _over_there(self) -> list[str]:
        return ["nsenter", f"--net=/proc/{self._there.pid}/ns/net"]

    @contextmanager
    def _cluster(self) -> Iterator[Process]:
        """Ray on both machines; that on the second."""
        shared = ["--object-store-memory", str(80 << 20), "--block"]
        head = ["--head", "--port", str(RAY_PORT), "--num-cpus", "2", "--include-dashboard=false"]
        joins = ["--address", RAY, "--num-cpus", "1"]
        start = [_program("ray"), "start", "--node-ip-address"]
        own = [*start, HERE, "--temp-dir", str(self.folder / "a"), *head, *shared]
        other = [*self._over_there(), *start, THERE, "--temp-dir", str(self.folder / "b"), *joins, *shared]
        started = "Ray runtime started"
        with self._process("first", own, started), self._process("second", other, started) as second:
            self.say("Ray runs on both")
            yield second

    @contextmanager
    def _server(self) -> Iterator[Process]:
        """Over both machines: one of the first's two CPUs is taken while ranks are placed."""
        serve = [_program("skipjoin"), "serve", "tally", "--host", HERE, "--port", str(HTTP_PORT)]
        ranks = ["--ray-address", RAY, "-pp", "2", "--threads", "1", "--profile", "off"]
        hold = [sys.executable, "-c", HOLD, RAY]
        with (
            self._process("hold", hold, "held") as holder,
            self._process("server", [*serve, *ranks], "Ready") as server,
        ):
            holder.end()
            self.say("the server is ready")
            yield server

    @contextmanager
    def _process(self, name: str, command: list[str], ready: str) -> Iterator[Process]:
        started = Process(self.folder / f"{name}.log", command)
        try:
            _until(lambda: ready in started.log() or not started.runs(), START_S, f"{name} is ready")
            assert started.runs(), f"{name} has ended"
            yield started
        finally:
            seconds = started.end()
            self.say(f"{name} has ended, within {seconds:.1f} s")

    def _ranks(self, ip: str) -> list[psutil.Process]:
        """The ranks that run on a machine."""
        network = os.readlink(f"/proc/{self._there.pid if ip == THERE else 'self'}/ns/net")
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if "RankActor" in process.name() and os.readlink(f"/proc/{process.pid}/ns/net") == network:
                    found.append(process)
        return found


class Process:
    """A program that runs, and what it has written so far."""

    def __init__(self, log: Path, command: list[str]) -> None:
        self._log = log
        with log.open("w") as out:
            self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT)

    def log(self) -> str:
        """All of it."""
        return self._log.read_text()

    def lines(self, words: str) -> list[str]:
        """Those that have these words."""
        return [line for line in self.log().splitlines() if words in line]

    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._popen.poll() is None

    def end(self) -> float:
        """Tell it to end; the seconds that this took."""
        begin = time.monotonic()
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        self._popen.terminate()
        try:
            self._popen.wait(END_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        return time.monotonic() - begin


class Stream(threading.Thread):
    """A streamed completion, read as it comes."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.text = ""
        self._url, self._body = url, body
        self._reason: str | None = None
        self.start()

    def run(self) -> None:
        """Read it to its end."""
        body = {**self._body, "stream": True}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=START_S) as response:
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data in ("", "[DONE]"):
                    continue
                event = json.loads(data)
                if "error" in event:
                    self._reason = event["error"]["message"]
                    return
                self.text += event["choices"][0]["text"]
                self._reason = event["choices"][0]["finish_reason"]

    def result(self) -> str:
        """The whole text and how it ended."""
        self.join(START_S)
        assert not self.is_alive(), "a stream does not end"
        return f"{self.text} ({self._reason})"


def _program(name: str) -> str:
    """One that is installed beside this Python."""
    return str(Path(sys.executable).with_name(name))


def _until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
