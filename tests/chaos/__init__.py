"""Chaos: a mixed load on a real server, a fault in the middle of it, and what must hold after every round.

    PYTHONPATH=tests python -m chaos --minutes 10
    PYTHONPATH=tests python -m chaos --seed 7 --round 31 --rounds 1

| module | what is in it |
|---|---|
| `catalog` | the requests whose answers are known: greedy or seeded |
| `plan` | a round as a function of seed and number: server, load, batch, fault and its moment |
| `faults` | what is done to a server, and which ends of requests it allows |
| `clients` | one request over HTTP in the manner of the plan, and what came of it |
| `served` | `skipjoin serve` with a small KV pool, its processes, and what it leaves |
| `checks` | what must hold: answers, idleness, metrics, leftovers |
| `driver` | runs rounds, one after another |
| `soak` | the load without faults, for an hour: memory and descriptors stay flat |
"""
