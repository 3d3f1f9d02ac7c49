"""Chaos tests: a mixed load on a real server, a fault in the middle of it, and checks after every round.

    PYTHONPATH=tests python -m chaos --minutes 10
    PYTHONPATH=tests python -m chaos --seed 7 --round 31 --rounds 1

| module | contents |
|---|---|
| `catalog` | requests with deterministic answers: greedy or seeded |
| `plan` | generates a round from seed and number: server, load, batch, fault and its time |
| `faults` | faults, and the request outcomes that each allows |
| `clients` | HTTP clients that send the planned requests and record the outcomes |
| `served` | `skipjoin serve` with a small KV pool, its processes and its leftovers |
| `invariants` | checks of answers, idleness and metrics, which the fuzzer makes as well |
| `driver` | runs rounds one after another |
| `soak` | runs the load without faults for an hour and checks that memory and descriptors do not grow |
"""
