from __future__ import annotations

from typing import Any

from vllm import outputs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import Request as VllmRequest
from vllm.version import __version__ as vllm_version

from skipjoin.options import ConfigError
from skipjoin.vllm import compat
from skipjoin.vllm.queues import Store

VERSION: str = vllm_version
# Since vLLM 0.32, waiting requests that hold KV have a queue of their own.
_HAS_HOLDING_QUEUE = hasattr(AsyncScheduler, "_holds_kv_blocks")
# Whether vLLM asks a method how far to cut a prompt.
CAN_CUT_PROMPTS = hasattr(AsyncScheduler, "_reserve_prefill_lookahead")


def check_release() -> None:
    optional = {name: call for name, call in compat.OPTIONAL.items() if hasattr(AsyncScheduler, name)}
    compat.check_attributes(AsyncScheduler, {**compat.METHODS, **optional}, VERSION)
    # A dict may be created without them.
    if lacks := sorted(Store.__abstractmethods__):
        raise ConfigError(
            f"queues of vLLM {VERSION} need {', '.join(lacks)}, which the Skipjoin scheduler lacks: {compat.remedy()}"
        )


class AnyScheduler(AsyncScheduler):
    """vLLM's scheduler with the attributes of the latest tested release.

    vLLM turns asynchronous scheduling off for classes other than `AsyncScheduler`.
    """

    running: list[VllmRequest]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_release()
        super().__init__(*args, **kwargs)
        compat.check_attributes(self, compat.STATE, VERSION)

    def fail_request(self, request_id: str, message: str) -> None:
        """Let the next `update_from_output` end a request with an error."""
        errors: Any = self.grammar_compile_error_reqs
        if isinstance(errors, dict):  # since vLLM 0.33, which tells the client why
            errors[request_id] = outputs.RequestError(code="validation_error", message=message)
        else:
            errors.add(request_id)

    if _HAS_HOLDING_QUEUE:

        def is_ready(self, request: VllmRequest) -> bool:
            """Return whether a blocked request, such as one whose grammar is compiled, can wait for its first step."""
            return bool(self._handle_blocked_waiting_request(request))

    else:
        deferred_waiting: set[VllmRequest] = set()

        @property
        def kv_holding_waiting(self) -> Any:
            """Waiting requests that vLLM drains first; older releases use it for blocked requests."""
            return self.skipped_waiting

        @kv_holding_waiting.setter
        def kv_holding_waiting(self, queue: Any) -> None:
            self.skipped_waiting = queue

        def _select_waiting_queue_for_scheduling(self) -> Any:
            return self.skipped_waiting or self.waiting or None

        def is_ready(self, request: VllmRequest) -> bool:
            """Return whether a blocked request, such as one whose grammar is compiled, can wait for its first step."""
            return bool(self._try_promote_blocked_waiting_request(request))
