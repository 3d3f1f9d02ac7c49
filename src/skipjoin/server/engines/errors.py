"""The failures of engines that end a sequence. `server.api.errors` maps them to answers."""

from __future__ import annotations


class EngineError(Exception):
    """The engines do not answer, or stop in the middle of an answer."""


class EngineDeadError(EngineError):
    """No engine is up, and none will be."""


class NoReplicaError(EngineError):
    """No engine is up; engines are being restarted."""


class LostRequestError(EngineError):
    """Engines ended while they ran the request, and it is not tried again."""

    def __init__(self, deaths: int) -> None:
        super().__init__(
            f"engines ended {deaths} times while they ran this request, which may be the cause and is not tried again"
        )


class EngineHungError(EngineError):
    """An engine is up, but makes no progress."""


class RefusedError(EngineError):
    """The engine refused the request. param: the field at fault. The text may be shown to clients."""

    def __init__(self, text: str, param: str | None) -> None:
        super().__init__(text)
        self.param = param
