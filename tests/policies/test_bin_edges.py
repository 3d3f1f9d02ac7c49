from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from skipjoin.policies.bin_edges import BinEdges
from support.load import make

EDGES = [1, 2, 5, 3]


@given(st.lists(st.sets(st.integers(0, 3)), max_size=40), st.sampled_from([0, 4, 9]))
def test_each_running_request_past_its_edge_is_found(steps: list[set[int]], forgotten_at: int) -> None:
    edges, requests = BinEdges(), [make(number, max_tokens=100) for number in range(len(EDGES))]

    def expect(request: int) -> None:
        edges.expect(requests[request], requests[request].progress.known + EDGES[request])

    for number in range(len(EDGES)):
        expect(number)
    live = {*range(len(EDGES))}
    for step, chosen in enumerate(steps):
        if step == forgotten_at:
            edges.forget(requests[0])
            live.discard(0)
        running = chosen & live
        edges.begin_step({requests[number] for number in running})
        past = {number for number in running if edges.is_past(requests[number])}
        assert {number for number in running if requests[number] in edges.reached} == past
        for number in past:
            expect(number)
            assert requests[number] not in edges.reached
        for number in running:
            requests[number].progress.known += 1
    assert requests[0] not in edges.reached or 0 in live
