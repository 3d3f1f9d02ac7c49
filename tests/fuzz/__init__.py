"""Fuzzing over HTTP: seeded requests of any form to a real server, and what must hold after every round.

    PYTHONPATH=tests python -m fuzz --minutes 5
    PYTHONPATH=tests python -m fuzz --seed 7 --round 31 --rounds 1 [--case 12]

| module | what is in it |
|---|---|
| `values` | JSON bodies: what the schemas allow, with odd values in any place |
| `wire` | bytes on a connection: heads, chunks, trailers, smuggling, pipelines, clients that leave |
| `forms` | multipart bodies of uploads |
| `lines` | JSONL files of batches |
| `stories` | sequences over files and batches, with several keys, concurrently |
| `case` | one connection's bytes and what its answers may be |
| `plan` | a round as a function of seed and number |
| `talk` | plays a case on a socket |
| `checks` | what must hold for an answer, and for the server after a round |
| `driver` | runs rounds on one server, alongside a canary |
"""
