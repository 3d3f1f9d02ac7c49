from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from skipjoin.exec.ranks.nodes import Node
from skipjoin.server.engines import supervisor
from skipjoin.server.engines.supervisor import CHECK_S, Needs, ReplicaSupervisor

NODES = [Node(name, f"10.0.0.{number}", 1, {"CPU": 8.0}) for number, name in enumerate("abc")]
GONE = RuntimeError("the engine process was killed by SIGKILL")


class RayError(Exception):
    """Raised for a dead process or node."""


class RayTaskError(RayError):
    def __init__(self, cause: Exception) -> None:
        super().__init__()
        self.cause = cause


class Call:
    """Call of an actor, whose answer the test sets. An exception as answer is raised."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.answer: list[Any] = []


class Actor:
    def __init__(self, labels: dict[str, str] | None) -> None:
        self.labels = labels
        self.calls: list[Call] = []
        self.is_killed = False

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Call:
            self.calls.append(Call(name))
            return self.calls[-1]

        return SimpleNamespace(remote=remote)

    def answer(self, answer: Any = None) -> None:
        assert not self.is_killed
        self.calls[-1].answer.append(answer)


class World:
    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, monkeypatch: pytest.MonkeyPatch, replicas: int = 2) -> None:
        self.now = 100.0
        self.actors: list[Actor] = []
        self.silent: list[Node] = []
        self.options_of_actors: dict[str, Any] = {}
        monkeypatch.setattr(supervisor, "import_ray", lambda: self)
        monkeypatch.setattr(supervisor, "known_nodes", lambda: NODES)
        monkeypatch.setattr(supervisor, "silent", lambda nodes: [node for node in nodes if node in self.silent])
        self.supervisor = ReplicaSupervisor(clock=lambda: self.now)
        self.supervisor.deploy(("program",), b"{}", replicas=replicas, needs=Needs(2, "cpu"))

    def remote(self, **options: Any) -> Callable[[type], Any]:
        self.options_of_actors = options
        return lambda kind: SimpleNamespace(
            options=lambda *, label_selector: SimpleNamespace(remote=lambda: self._create(label_selector))
        )

    def _create(self, labels: dict[str, str] | None) -> Actor:
        self.actors.append(Actor(labels))
        return self.actors[-1]

    @staticmethod
    def wait(calls: list[Call], *, timeout: float) -> tuple[list[Call], list[Call]]:
        assert timeout == 0
        return [call for call in calls if call.answer], [call for call in calls if not call.answer]

    @staticmethod
    def get(call: Call) -> Any:
        (answer,) = call.answer
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self, actor: Actor) -> None:
        actor.is_killed = True

    def check(self, seconds: float = 0.0) -> str | None:
        trouble = self.supervisor.check()
        end = self.now + seconds
        while self.now < end:
            self.now += CHECK_S
            trouble = self.supervisor.check()
        return trouble

    def bring_up(self, actor: Actor, node: str = "a") -> None:
        actor.answer(node)
        self.check()
        actor.answer()
        self.check()
        assert [call.name for call in actor.calls] == ["place", "start", "check_health"]

    @property
    def live(self) -> list[Actor]:
        return [actor for actor in self.actors if not actor.is_killed]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(monkeypatch)
    for actor, node in zip(list(made.actors), "ab", strict=True):
        made.bring_up(actor, node)
    assert made.options_of_actors == {"num_cpus": 2, "num_gpus": 0, "scheduling_strategy": "SPREAD"}
    return made


@pytest.mark.parametrize("end", [RayTaskError(GONE), RayError("no details")])
def test_dead_replica_is_replaced_immediately(world: World, caplog: pytest.LogCaptureFixture, end: Exception) -> None:
    first, second = world.actors
    for _ in range(3):
        first.answer()
        second.answer()
        world.check()
    first.answer(end)
    assert world.check() is None
    assert world.live == [second]
    assert ("SIGKILL" if isinstance(end, RayTaskError) else "process, or its machine") in caplog.text
    world.check()
    _, third = world.live
    world.bring_up(third)
    assert len(world.actors) == 3


def test_unresponsive_replica_is_replaced(world: World) -> None:
    other = world.actors[1]
    world.check(supervisor._ANSWER_S - 2)
    other.answer()
    world.check(1)
    assert len(world.live) == 2
    world.check(2)
    assert other in world.live
    assert len(world.actors) == 3


def test_suspension_of_the_server_does_not_count_as_silence(world: World) -> None:
    world.now += 1000
    world.check(supervisor._ANSWER_S / 2)
    assert len(world.actors) == 2


@pytest.mark.parametrize("is_running", [True, False])
def test_replica_on_unreachable_node_is_replaced_on_another_node(
    monkeypatch: pytest.MonkeyPatch, is_running: bool
) -> None:
    world = World(monkeypatch, replicas=1)
    (first,) = world.actors
    if is_running:
        world.bring_up(first, "b")
    else:
        first.answer("b")
        world.check()
    world.silent = [NODES[1]]
    world.check(supervisor._LATE_S + 2)
    (second,) = world.live
    assert second.labels == {"ray.io/node-id": "!in(b)"}
    assert first.labels is None


def test_failed_starts_are_retried_with_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, replicas=1)
    times: list[float] = []
    for _ in range(10):
        times.append(world.now)
        (actor,) = world.live
        actor.answer("a")
        world.check()
        actor.answer(RayTaskError(GONE))
        found = world.check()
        assert (found is None) == (len(times) < 3)
        while not world.live:
            world.check(CHECK_S)
    delays = [later - earlier for earlier, later in pairwise(times)]
    assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert world.check() == f"10 starts in a row failed, the last one: {GONE}"
    world.bring_up(world.live[0])
    assert world.check() is None


def test_replica_waiting_for_resources_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(monkeypatch, replicas=1)
    assert world.check(2.5 * supervisor._PLACE_S) is None
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["no node of the cluster has 2 free CPUs for a replica"] * 2
    world.bring_up(world.actors[0])


def test_unresponsive_cluster_is_reported(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[Node]:
        raise ConnectionError

    world.actors[0].answer(RayError())
    world.check()
    monkeypatch.setattr(supervisor, "known_nodes", fail)
    assert world.check() == "Ray does not answer: ConnectionError"


def test_close_kills_all_replicas(world: World) -> None:
    world.supervisor.close()
    assert world.live == []
