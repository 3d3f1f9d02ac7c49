from __future__ import annotations


class EngineError(Exception):
    pass


class EngineDeadError(EngineError):
    """No engine is running, and none will start."""


class NoReplicaError(EngineError):
    """No engine is running. Engines are being restarted."""


class LostRequestError(EngineError):
    def __init__(self, deaths: int) -> None:
        super().__init__(
            f"engines ended {deaths} times while they ran this request, which may be the cause and is not tried again"
        )


class EngineHungError(EngineError):
    pass


class RefusedError(EngineError):
    """The engine refused the request. The text may be shown to clients."""

    def __init__(self, text: str, param: str | None) -> None:
        super().__init__(text)
        self.param = param
