"""Reachable machines of a Ray cluster. Ray may take a minute or more to detect an unreachable one."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from skipjoin.exec.ranks.cluster import import_ray

# Timeout in seconds for connecting to a node; allows for a lost packet or two.
_ANSWER_S = 4.0
# Ray's node name label, for placement.
_NAME_LABEL = "ray.io/node-id"


class Node(NamedTuple):
    name: str
    ip: str
    port: int
    has: dict[str, float]


def known_nodes() -> list[Node]:
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], node["NodeManagerPort"], node["Resources"])
        for node in import_ray().nodes()
        if node["Alive"]
    ]


def silent(nodes: Sequence[Node]) -> list[Node]:
    if not nodes:
        return []
    with ThreadPoolExecutor(len(nodes)) as pool:
        return [node for node, answers in zip(nodes, pool.map(_answers, nodes), strict=True) if not answers]


def excluding(nodes: Sequence[Node]) -> dict[str, str]:
    return {_NAME_LABEL: f"!in({','.join(node.name for node in nodes)})"} if nodes else {}


def _answers(node: Node) -> bool:
    try:
        socket.create_connection((node.ip, node.port), _ANSWER_S).close()
    except OSError:
        return False
    return True
