"""Run a model on two machines and disconnect one of them while requests stream: `make test-cluster`.

    python cut_off.py [forgets]

By default Ray considers the machine alive throughout, as it does for about a minute. With `forgets`, Ray soon declares
it dead and does not accept it again.

The machines are network namespaces joined by a virtual cable. The first runs Ray's head and the server and has room for
the whole model; the second runs one pipeline stage at first. This needs root, util-linux and iproute2. The exit code is
0 on success, 1 on failure and 77 if a requirement is missing.

Everything runs in a new PID namespace, so that no process survives it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.leftovers import Mark
from support.streams import Stream

SKIPPED = 77
# From the address range reserved for network benchmarks (RFC 2544).
HERE, THERE, RAY_PORT, HTTP_PORT = "198.18.0.1", "198.18.0.2", 6399, 8123
RAY = f"{HERE}:{RAY_PORT}"
# Maximum seconds from the cut until the engine detects it, from then until requests continue, and from the cut until
# the old rank on the disconnected machine has exited.
NOTICE_S, REBUILD_S, STALE_S = 8.0, 10.0, 10.0
# Maximum seconds of every other start and stop.
START_S, END_S = 90.0, 20.0
# With these settings Ray declares a node dead after about six seconds instead of a minute or more.
FORGETS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
# Number of characters of each stream before the cable is disconnected.
MIN_CHARACTERS = 40
# Greedy and seeded requests with long answers of the built-in model.
BODIES: list[dict[str, Any]] = [
    {"prompt": f"Count from {first} to 99\n", "max_tokens": 900, "ignore_eos": True, **sampling}
    for first in (1, 7, 30)
    for sampling in ({"temperature": 0}, {"temperature": 1.0, "seed": 5})
]
# Occupies a CPU of the first machine while ranks are placed, so that one rank is placed on the second machine.
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
    """Run the test in new namespaces and return the exit code."""
    forgets = sys.argv[1:2] == ["forgets"]
    if sys.argv[-1] == "inside":
        return Rehearsal(Path(os.environ["SKIPJOIN_REHEARSAL"]), forgets).run()
    if reason := _missing_requirement():
        print(f"skipped: {reason}")
        return SKIPPED
    mark, folder = Mark(), Path(tempfile.mkdtemp(prefix="skipjoin-cut-off-"))
    try:
        inside = [*_namespaces(), sys.executable, __file__, *sys.argv[1:], "inside"]
        environment = mark.environment | _environment(folder) | (FORGETS if forgets else {})
        code = subprocess.run(inside, env=environment, check=False).returncode
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    # Network namespaces disappear with their processes.
    leftovers = [f"process {process.pid} {process.name()}" for process in mark.processes()]
    if folder.exists():
        leftovers.append(str(folder))
    if leftovers:
        print(f"left behind: {', '.join(leftovers)}")
        return 1
    print("no processes or files remain")
    return code


def _namespaces() -> list[str]:
    return ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]


def _missing_requirement() -> str | None:
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


class Rehearsal:
    """Runs the test inside the namespaces."""

    def __init__(self, folder: Path, forgets: bool) -> None:
        self.folder, self.forgets = folder, forgets
        self.began = time.monotonic()
        self.url = f"http://{HERE}:{HTTP_PORT}"

    def run(self) -> int:
        try:
            self._lay_cable()
            with self._cluster() as second, self._server() as server:
                self._rehearse(server, second)
        except Exception as error:
            self.say(f"FAILED: {type(error).__name__}: {error}")
            for log in sorted(self.folder.glob("*.log")):
                print(f"--- {log.name}\n{log.read_text()[-4000:]}")
            return 1
        self.say("a machine was disconnected in mid-stream without any effect on clients")
        return 0

    def say(self, text: str) -> None:
        """Print a step with the seconds since the start."""
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)

    # -- steps -----------------------------------------------------------------------------------------

    def _rehearse(self, server: Process, second: Process) -> None:
        undisturbed = self._stream_all()
        self.say(f"{len(BODIES)} streams without failures: {sum(map(len, undisturbed))} characters")
        assert len(self._ranks(THERE)) == 1, f"the second machine should have one rank: {self._ranks(THERE)}"
        self._cut_in_mid_stream(server, undisturbed)
        self._plug(True)
        self.say("the cable is reconnected")
        if self.forgets:
            _until(lambda: not second.runs(), START_S, "Ray on the second machine exits")
            self.say("Ray on the second machine has exited because it was declared dead")
        assert self._stream_all() == undisturbed, "after reconnecting, streams differ"
        self.say("after reconnecting, streams are the same")
        assert second.runs() != self.forgets
        starts = len(server.lines("restarting all ranks"))
        self._plug(False)
        assert self._stream_all() == undisturbed, "without the second machine, streams differ"
        assert len(server.lines("restarting all ranks")) == starts, "ranks were restarted unnecessarily"
        self._plug(True)
        self.say("disconnecting the second machine, which has no rank now, has no effect")

    def _cut_in_mid_stream(self, server: Process, expected: list[str]) -> None:
        """Disconnect the cable during streams, and check detection, restart and output."""
        streams = [Completion(self.url, body) for body in BODIES]
        _until(lambda: all(len(stream.text) > MIN_CHARACTERS for stream in streams), START_S, "streams begin")
        self._plug(False)
        cut = time.monotonic()
        received = [len(stream.text) for stream in streams]
        finished = sum(not stream.is_alive() for stream in streams)
        self.say(f"the cable is disconnected after {sum(received)} characters; {finished} streams have finished")
        assert finished == 0, "streams finished before the cable was disconnected"
        _until(lambda: bool(server.lines("restarting all ranks")), START_S, "the engine detects the cut")
        detected = time.monotonic()
        self.say(f"the engine detected it after {detected - cut:.1f} s: {server.lines('restarting all ranks')[-1]}")
        _until(lambda: not self._ranks(THERE), START_S, "the old rank exits")
        gone = time.monotonic()
        self.say(f"the old rank on the second machine exited {gone - cut:.1f} s after the cut")
        _until(lambda: bool(server.lines("the ranks were restarted")), START_S, "the ranks are ready")
        ready = time.monotonic()
        self.say(f"all ranks run on the first machine, {ready - detected:.1f} s later")
        found = [stream.result() for stream in streams]
        assert found == expected, "streams differ after the cut"
        self.say(f"all streams finished with the expected output {time.monotonic() - cut:.1f} s after the cut")
        assert len(self._ranks(HERE)) == 2
        assert len(server.lines("restarting all ranks")) == 1, (
            f"{len(server.lines('restarting all ranks'))} restarts instead of one"
        )
        assert detected - cut < NOTICE_S, f"detection took {detected - cut:.1f} s"
        assert gone - cut < STALE_S, f"the old rank exited after {gone - cut:.1f} s"
        assert ready - detected < REBUILD_S, f"the restart took {ready - detected:.1f} s"

    def _stream_all(self) -> list[str]:
        return [stream.result() for stream in [Completion(self.url, body) for body in BODIES]]

    # -- the machines -----------------------------------------------------------------------------------------

    def _lay_cable(self) -> None:
        """Connect a bridge on the first machine to the second, so that both keep their addresses while disconnected."""
        self._there = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        own = os.readlink("/proc/self/ns/net")
        _until(lambda: os.readlink(f"/proc/{self._there.pid}/ns/net") != own, 5, "a new network namespace")
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
        self.say("two networks are connected")

    def _plug(self, connected: bool) -> None:
        subprocess.run(["ip", "link", "set", "sj-port", "up" if connected else "down"], check=True)

    def _over_there(self) -> list[str]:
        return ["nsenter", f"--net=/proc/{self._there.pid}/ns/net"]

    @contextmanager
    def _cluster(self) -> Iterator[Process]:
        shared = ["--object-store-memory", str(80 << 20), "--block"]
        head = ["--head", "--port", str(RAY_PORT), "--num-cpus", "2", "--include-dashboard=false"]
        joins = ["--address", RAY, "--num-cpus", "1"]
        start = [_program("ray"), "start", "--node-ip-address"]
        own = [*start, HERE, "--temp-dir", str(self.folder / "a"), *head, *shared]
        other = [*self._over_there(), *start, THERE, "--temp-dir", str(self.folder / "b"), *joins, *shared]
        started = "Ray runtime started"
        with self._process("first", own, started), self._process("second", other, started) as second:
            self.say("Ray runs on both machines")
            yield second

    @contextmanager
    def _server(self) -> Iterator[Process]:
        """Run the server on both machines, with a CPU of the first one occupied while ranks are placed."""
        serve = [_program("skipjoin"), "serve", "tally", "--host", HERE, "--port", str(HTTP_PORT), "--allow-no-key"]
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
            assert started.runs(), f"{name} exited during its start"
            yield started
        finally:
            seconds = started.end()
            self.say(f"{name} exited within {seconds:.1f} s")

    def _ranks(self, ip: str) -> list[psutil.Process]:
        network = os.readlink(f"/proc/{self._there.pid if ip == THERE else 'self'}/ns/net")
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if "RankActor" in process.name() and os.readlink(f"/proc/{process.pid}/ns/net") == network:
                    found.append(process)
        return found


class Process:
    def __init__(self, log: Path, command: list[str]) -> None:
        self._log = log
        with log.open("w") as out:
            self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT)

    def log(self) -> str:
        return self._log.read_text()

    def lines(self, words: str) -> list[str]:
        return [line for line in self.log().splitlines() if words in line]

    def runs(self) -> bool:
        return self._popen.poll() is None

    def end(self) -> float:
        begin = time.monotonic()
        self._popen.stdin.close()
        self._popen.terminate()
        try:
            self._popen.wait(END_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        return time.monotonic() - begin


class Completion(Stream):
    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__(f"{url}/v1/completions", body, START_S)

    @property
    def text(self) -> str:
        return "".join(event["choices"][0]["text"] for event in self.events() if "choices" in event)

    def result(self) -> str:
        """Wait for the end and return the text with its finish reason."""
        self.last()
        last = self.events()[-1]
        return f"{self.text} ({last['choices'][0]['finish_reason'] if 'choices' in last else last['error']['message']})"


def _program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main())
