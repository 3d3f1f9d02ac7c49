"""HTTP fuzzing: seeded random requests to a real server, and checks after every round.

    PYTHONPATH=tests python -m fuzz --minutes 5
    PYTHONPATH=tests python -m fuzz --seed 7 --round 31 --rounds 1 [--case 12]

| module | contents |
|---|---|
| `values` | JSON bodies that the schemas allow, with odd values in random places |
| `wire` | raw bytes: heads, chunks, trailers, smuggling, pipelining, disconnecting clients |
| `forms` | multipart bodies of uploads |
| `lines` | JSONL files of batches |
| `stories` | sequences over files and batches, with several keys, concurrently |
| `case` | bytes of one connection, the allowed answers, and what is wrong with one |
| `plan` | generates a round from seed and number |
| `talk` | runs a case on a socket |
| `driver` | runs rounds on one server alongside a canary, and checks the server |
"""
