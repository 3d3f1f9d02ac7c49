from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from skipjoin.observe.life import current_prediction
from skipjoin.server.engines.connected_engine import ConnectedEngine
from skipjoin.server.engines.messages import RequestState, RequestStates
from skipjoin.server.engines.sequences import EngineSequence


class LiveRequest(NamedTuple):
    """Unfinished sequence, without `replica` while it waits for one."""

    label: str
    choice: int
    replica: int | None
    state: RequestState
    owner: str

    def row(self) -> dict[str, Any]:
        state = msgspec.structs.asdict(self.state)
        del state["facts"]
        return {"id": self.label, "choice": self.choice, "replica": self.replica, **state}


class LiveRequests(NamedTuple):
    requests: list[LiveRequest]
    silent: list[int]


def live_requests(replica: ConnectedEngine, reply: RequestStates) -> list[LiveRequest]:
    return [
        LiveRequest(sequence.label, sequence.index, replica.number, state, sequence.owner)
        for state in reply.requests
        if (sequence := replica.sequences.get(state.number)) is not None
    ]


def waiting_request(sequence: EngineSequence) -> LiveRequest:
    request = sequence.request
    predicted = current_prediction(request)
    state = RequestState(
        number=request.id,
        state="waiting",
        service=request.options.service,
        is_urgent=request.options.is_urgent,
        priority=request.options.priority,
        place=None,
        prompt_tokens=len(request.prompt),
        output_tokens=len(request.output),
        computed_tokens=0,
        device_blocks=0,
        cpu_blocks=0,
        wait_reason="no_replica",
        wait_s=None,
        predicted_tokens=predicted and predicted.tokens,
        forecast_source=predicted and predicted.source,
        predicted_low=predicted and predicted.low,
        predicted_high=predicted and predicted.high,
        max_tokens=request.max_tokens,
    )
    return LiveRequest(sequence.label, sequence.index, None, state, sequence.owner)
