"""A batch whose server is killed again and again: whether each line is answered once, and what runs twice.

    python benchmarks/performance/batches/kills.py [--kills 5] [--lines 400] [--seed 0] [--out FILE]

Serves the built-in model, and kills its API process or its engine (SIGKILL), whichever chance says, at random moments
while the batch runs. After each kill the server is started anew on the same folder. At the end every custom_id has to
be exactly once in the output file, with the answer that a request over HTTP gets, and the last server has to have
generated exactly the tokens of the lines that were not written when it started (`batch_generation_tokens_total`).
"""

from __future__ import annotations

import argparse
import json
import random
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
from served import Server, submit, wait

sys.path.insert(0, str(Path(__file__).parents[2]))
from machine import describe_machine

TOKENS, COMPARED = 200, 20
OPTIONS = ("--profile", "off", "--kv-cache-gib", "0.1", "--batch-inflight", "32")


def body(number: int) -> dict[str, Any]:
    """The request of a line: greedy, and of a known length."""
    return {"prompt": f"Count from {number}", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


def written(folder: Path) -> int:
    """Lines whose answers are in the database."""
    with closing(sqlite3.connect(folder / "batches.sqlite3")) as database:
        return int(database.execute("SELECT completed FROM batches").fetchone()[0])


def measure(kills: int, lines: int, seed: int, folder: Path) -> dict[str, Any]:
    """The whole experiment."""
    dice, server = random.Random(seed), Server(folder, *OPTIONS)
    batch, rounds = submit(server.client, [body(number) for number in range(lines)]), []
    wait(server.client, batch, "in_progress")
    for _ in range(kills):
        time.sleep(dice.uniform(0.2, 1.2))
        victim = dice.choice(["api", "engine"])
        server.kill(victim)
        rounds.append({"victim": victim, "written": written(folder)})
        print(rounds[-1], flush=True)
        server = Server(folder, *OPTIONS)
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
    """Whether a request over HTTP gets the same text."""
    asked = body(int(answer["custom_id"]))
    extra = {"ignore_eos": asked.pop("ignore_eos")}
    direct = client.completions.create(model="tally", extra_body=extra, **asked)
    return bool(answer["response"]["body"]["choices"][0]["text"] == direct.choices[0].text)


def main() -> int:
    """1 if an answer is missing, doubled or another one, or a written line has run again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--lines", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args.kills, args.lines, args.seed, Path(folder))
    found["machine"] = describe_machine()
    print(json.dumps(found, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    is_good = found["once"] and found["same"] and found["last_server_tokens"] == found["tokens_left_for_it"]
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
