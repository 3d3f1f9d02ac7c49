"""Check that a batch whose server is killed repeatedly answers each line once and regenerates nothing it has written.

    python benchmarks/performance/batches/kills.py [--kills 5] [--lines 400] [--seed 0] [--out FILE]

The script serves the built-in model and kills its API process or its engine (SIGKILL) at random moments while the batch
runs. After each kill a new server starts on the same folder. At the end every custom_id must be in the output file
exactly once, with the answer that a request over HTTP gets. The last server must have generated exactly the tokens of
the lines that were not written when it started (`batch_generation_tokens_total`).
"""

from __future__ import annotations

import json
import random
import sqlite3
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
from served import BatchServer, submit, wait

import harness

TOKENS, COMPARED = 200, 20
OPTIONS = ("--profile", "off", "--kv-cache-gib", 0.1, "--batch-inflight", 32)


def body(number: int) -> dict[str, Any]:
    """Return the greedy request of a line, with a fixed number of output tokens."""
    return {"prompt": f"Count from {number}", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


def written(folder: Path) -> int:
    """Return the number of lines whose answers are in the database."""
    with closing(sqlite3.connect(folder / "batches.sqlite3")) as database:
        return int(database.execute("SELECT completed FROM batches").fetchone()[0])


def measure(kills: int, lines: int, seed: int, folder: Path) -> dict[str, Any]:
    """Run the experiment."""
    dice, server = random.Random(seed), BatchServer(folder, *OPTIONS)
    batch, rounds = submit(server.client, [body(number) for number in range(lines)]), []
    wait(server.client, batch, "in_progress")
    for _ in range(kills):
        time.sleep(dice.uniform(0.2, 1.2))
        victim = dice.choice(["api", "engine"])
        server.kill(victim)
        rounds.append({"victim": victim, "written": written(folder)})
        harness.show(rounds[-1])
        server = BatchServer(folder, *OPTIONS)
    done = wait(server.client, batch, "completed")
    last = int(server.metric("batch_generation_tokens_total"))
    left = lines - rounds[-1]["written"] if rounds else lines
    answers = [json.loads(text) for text in server.client.files.content(done.output_file_id or "").text.splitlines()]
    ids = Counter(answer["custom_id"] for answer in answers)
    same = all(is_same(server.client, answer) for answer in dice.sample(answers, min(COMPARED, lines)))
    server.stop()
    return {
        "lines": lines,
        "rounds": rounds,
        "once": ids == Counter(map(str, range(lines))) and done.error_file_id is None,
        "same": same,
        "last_server_tokens": last,
        "tokens_left_for_it": left * TOKENS,
    }


def is_same(client: openai.OpenAI, answer: dict[str, Any]) -> bool:
    """Return whether a request over HTTP gets the same text."""
    asked = body(int(answer["custom_id"]))
    extra = {"ignore_eos": asked.pop("ignore_eos")}
    direct = client.completions.create(model="tally", extra_body=extra, **asked)
    return bool(answer["response"]["body"]["choices"][0]["text"] == direct.choices[0].text)


def main() -> int:
    """Return 1 if an answer is missing, repeated or different, or if a written line ran again."""
    args = harness.parser(__doc__, kills=5, lines=400, seed=0).parse_args()
    record = harness.new_record()
    with harness.scratch() as folder:
        found = measure(args.kills, args.lines, args.seed, folder)
    harness.report(record | found, args.out)
    is_good = found["once"] and found["same"] and found["last_server_tokens"] == found["tokens_left_for_it"]
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
