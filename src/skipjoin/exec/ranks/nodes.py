"""The machines of a Ray cluster as they are at this moment. Ray may take a minute or more to say that one is cut off,
and until then it places processes there; a connection that nobody takes says it in seconds."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from skipjoin.exec.ranks.cluster import import_ray

# Longest that a node's machine may take to answer, in seconds: a packet or two may be lost on the way.
_ANSWER_S = 4.0
# By which Ray lets a node be named where processes are placed.
_NAME_LABEL = "ray.io/node-id"


class Node(NamedTuple):
    """name: Ray's. ip, port: where its Ray process listens. has: its resources, whoever uses them."""

    name: str
    ip: str
    port: int
    has: dict[str, float]


def known_nodes() -> list[Node]:
    """All that Ray takes for alive."""
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], node["NodeManagerPort"], node["Resources"])
        for node in import_ray().nodes()
        if node["Alive"]
    ]


def silent(nodes: Sequence[Node]) -> list[Node]:
    """Those that nobody can reach from here, known after `_ANSWER_S` at the latest, and at once if all can."""
    if not nodes:
        return []
    with ThreadPoolExecutor(len(nodes)) as pool:
        return [node for node, answers in zip(nodes, pool.map(_answers, nodes), strict=True) if not answers]


def away_from(nodes: Sequence[Node]) -> dict[str, str]:
    """Labels that a node must have to be none of these."""
    return {_NAME_LABEL: f"!in({','.join(node.name for node in nodes)})"} if nodes else {}


def _answers(node: Node) -> bool:
    try:
        socket.create_connection((node.ip, node.port), _ANSWER_S).close()
    except OSError:
        return False
    return True
