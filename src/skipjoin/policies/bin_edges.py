from __future__ import annotations

from collections import defaultdict

from skipjoin.core.request import Request


class BinEdges:
    """The requests that reach the edge of their bin of lengths, found without a look at each request in each step.

    A step adds at most one token to a request. So it is looked at again after as many steps as it lacks tokens, and if
    it has fewer by then, once it runs again.
    """

    def __init__(self) -> None:
        self.reached: set[Request] = set()  # leave their bin in their next step
        self._step = 0
        self._edges: dict[Request, int] = {}  # known tokens at which a request leaves its bin
        self._looks: dict[Request, int] = {}  # step in which a request is looked at
        self._due: defaultdict[int, set[Request]] = defaultdict(set)  # by the number of the step
        self._paused: set[Request] = set()  # did not run in the step in which they were due

    def expect(self, request: Request, edge: int) -> None:
        """Follow a request that leaves its bin with `edge` known tokens."""
        self.forget(request)
        self._edges[request] = edge
        self._await(request)

    def is_past(self, request: Request) -> bool:
        return request.progress.known >= self._edges.get(request, 0)

    def begin_step(self, running: set[Request]) -> None:
        self._step += 1
        if self._paused and (resumed := self._paused & running):
            self._paused -= resumed
            for request in resumed:
                self._await(request)
        if (due := self._due.pop(self._step, None)) is None:
            return
        for request in due:
            if self.is_past(request):
                self.reached.add(request)
            elif request in running:
                self._await(request)
            else:
                # Its tokens stay as they are until it runs, however many requests pause.
                self._paused.add(request)

    def forget(self, request: Request) -> None:
        if self._edges.pop(request, None) is None:
            return
        self.reached.discard(request)
        self._paused.discard(request)
        step = self._looks.pop(request)
        if (waiting := self._due.get(step)) is not None:
            waiting.discard(request)
            if not waiting:
                del self._due[step]

    def _await(self, request: Request) -> None:
        step = self._looks[request] = self._step + self._edges[request] - request.progress.known
        self._due[step].add(request)
