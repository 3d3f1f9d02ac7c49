from __future__ import annotations

from collections.abc import Iterable

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request


class Store(dict[Request, None], RequestQueue):
    def add_request(self, request: Request) -> None:
        self[request] = None

    prepend_request = add_request

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        self.update(dict.fromkeys(requests))

    def peek_request(self) -> Request:
        return next(iter(self))

    def pop_request(self) -> Request:
        request = self.peek_request()
        del self[request]
        return request

    def remove_request(self, request: Request) -> None:
        self.pop(request, None)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.pop(request, None)

    def __bool__(self) -> bool:
        return len(self) > 0
