from __future__ import annotations

from typing import NamedTuple

from skipjoin.config import ServerConfig
from skipjoin.server.api.auth import ANONYMOUS


class Viewer(NamedTuple):
    """What a key may see of the server's requests.

    Attributes:
        owner: Whose requests alone are shown; None for all.
        has_totals: Whether figures over all keys are shown, from whose changes one could tell the lengths of a request.
    """

    key: str
    owner: str | None
    has_totals: bool


def viewer_of(config: ServerConfig, key: str) -> Viewer:
    sees_all = key == ANONYMOUS or config.rights_of(key).is_operator
    return Viewer(key, None if sees_all else key, sees_all or len(set(config.api_keys)) == 1)
