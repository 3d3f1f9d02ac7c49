"""What a sequence can end with that is not its own doing. `server.api.errors` says what clients get for each."""

from __future__ import annotations


class EngineError(Exception):
    """The engines give no answer, or no more of it."""


class EngineDeadError(EngineError):
    """No engine is there, and none will be."""


class NoReplicaError(EngineError):
    """No engine is there; they are being started again."""


class RefusedError(EngineError):
    """The engine would not take the request. param: the field at fault. The text may be shown to clients."""

    def __init__(self, text: str, param: str | None) -> None:
        super().__init__(text)
        self.param = param
