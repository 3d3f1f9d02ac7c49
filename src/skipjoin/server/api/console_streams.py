from __future__ import annotations

from skipjoin.server.api.feed import Feed
from skipjoin.server.api.replays import Replays
from skipjoin.server.api.service import Service


class ConsoleStreams:
    """Snapshots and simulations, whose open streams would delay the end of the server."""

    def __init__(self, service: Service, *, has_batches: bool = False) -> None:
        self.feed = Feed(service, has_batches=has_batches)
        self.replays = Replays()

    def close(self) -> None:
        self.feed.close()
        self.replays.close()
