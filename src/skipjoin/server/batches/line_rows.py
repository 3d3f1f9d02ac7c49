from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection

from skipjoin.server.batches.batch_rows import is_for
from skipjoin.server.batches.database import Session, repeated
from skipjoin.server.batches.records import BatchStatus, Line, LineResult, LineState
from skipjoin.server.batches.tables import batches, lines, results

# Rows per statement, because SQLite limits the number of parameters.
_CHUNK = 500


class Waiting(NamedTuple):
    expires_at: int
    seq: int
    batch_id: str
    ready: int


class LineRows:
    def __init__(self, session: Session) -> None:
        self._session, self._db = session, session.db

    @repeated
    async def take(self, limit: int, models: Collection[str] = ()) -> list[Line]:
        """Take READY lines from owners with the fewest running ones, earliest expiry first."""
        async with self._db.writing() as connection:
            found = await self._in_progress(connection, is_for(models))
            running = await _running(connection, list(found))
            waiting: dict[str, list[Waiting]] = defaultdict(list)
            runs: Counter[str] = Counter()
            for row in found.values():
                own = running[row["id"]]
                runs[row["owner"]] += own
                if ready := row["total"] - row["completed"] - row["failed"] - own:
                    waiting[row["owner"]].append(Waiting(row["expires_at"], row["seq"], row["id"], ready))
            turns = deal(waiting, runs, limit)
            taken = [
                line
                for batch_id, share in Counter(turns).items()
                for line in await self._take(connection, found[batch_id], share)
            ]
        return in_turns(taken, turns)

    async def states(self) -> dict[str, int]:
        async with self._db.reading() as connection:
            found = await self._in_progress(connection, sa.true())
            running = (await _running(connection, list(found))).total()
        left = sum(row["total"] - row["completed"] - row["failed"] for row in found.values())
        return {LineState.READY: max(0, left - running), LineState.RUNNING: running}

    async def _in_progress(self, connection: AsyncConnection, chosen: sa.ColumnElement[bool]) -> dict[str, RowMapping]:
        live = sa.and_(batches.c.status == BatchStatus.IN_PROGRESS, batches.c.expires_at > self._session.now(), chosen)
        rows = (await connection.execute(sa.select(batches).where(live))).mappings()
        return {row["id"]: row for row in rows}

    async def _take(self, connection: AsyncConnection, batch: RowMapping, share: int) -> list[Line]:
        ready = sa.select(lines).where(lines.c.batch_id == batch["id"], lines.c.state == LineState.READY)
        query = ready.order_by(lines.c.number).limit(share).with_for_update(skip_locked=True)
        rows = (await connection.execute(query)).mappings().all()
        numbers = [row["number"] for row in rows]
        for start in range(0, len(numbers), _CHUNK):
            some = lines.c.number.in_(numbers[start : start + _CHUNK])
            await connection.execute(
                sa.update(lines)
                .where(lines.c.batch_id == batch["id"], some)
                .values(state=LineState.RUNNING, server=self._session.server, attempt=lines.c.attempt + 1)
            )
        return [_line(row, batch) for row in rows]

    @repeated
    async def put_back(self, taken: Sequence[Line]) -> None:
        async with self._db.writing() as connection:
            held = await self._running_of(connection, taken)
            for lost in sorted({line.lost for line in taken}):
                some = [line for line in taken if line.lost == lost and line.key in held]
                await _set_states(connection, some, LineState.READY, lost=lost)

    @repeated
    async def finish(self, ended: Sequence[LineResult]) -> int:
        """Return the number of results whose lines still run here at this attempt."""
        unique = {result.line.key: result for result in ended}
        async with self._db.writing() as connection:
            held = await self._running_of(connection, [result.line for result in unique.values()])
            valid = [result for key, result in unique.items() if key in held]
            if not valid:
                return 0
            for state in (LineState.DONE, LineState.FAILED):
                await _set_states(connection, [result.line for result in valid if result.state is state], state)
            bodies = [
                {"batch_id": result.line.batch_id, "number": result.line.number, "body": result.body}
                for result in valid
            ]
            await connection.execute(sa.insert(results), bodies)
            await _count(connection, valid)
        return len(valid)

    @repeated
    async def close(self, batch_id: str, state: LineState) -> int:
        is_open = lines.c.state.in_([LineState.READY, LineState.RUNNING])
        async with self._db.writing() as connection:
            closed = sa.update(lines).where(lines.c.batch_id == batch_id, is_open).values(state=state, server=None)
            return (await connection.execute(closed)).rowcount

    async def _running_of(self, connection: AsyncConnection, named: Sequence[Line]) -> set[tuple[str, int, int]]:
        """Lock those lines that run here, in the same order on all servers."""
        held: set[tuple[str, int, int]] = set()
        columns = (lines.c.batch_id, lines.c.number, lines.c.attempt)
        mine = sa.and_(lines.c.state == LineState.RUNNING, lines.c.server == self._session.server)
        for batch_id, numbers in _by_batch(named):
            for start in range(0, len(numbers), _CHUNK):
                some = lines.c.number.in_(numbers[start : start + _CHUNK])
                query = sa.select(*columns).where(lines.c.batch_id == batch_id, some, mine).order_by(lines.c.number)
                rows = await connection.execute(query.with_for_update())
                held.update((row.batch_id, row.number, row.attempt) for row in rows)
        return held


def deal(waiting: dict[str, list[Waiting]], running: Counter[str], limit: int) -> list[str]:
    queues = {owner: deque(sorted(own)) for owner, own in waiting.items()}
    turns = [(running[owner], queue[0], owner) for owner, queue in queues.items()]
    heapq.heapify(turns)
    dealt: list[str] = []
    while turns and len(dealt) < limit:
        runs, batch, owner = heapq.heappop(turns)
        dealt.append(batch.batch_id)
        queue = queues[owner]
        queue[0] = queue[0]._replace(ready=queue[0].ready - 1)
        if not queue[0].ready:
            queue.popleft()
        if queue:
            heapq.heappush(turns, (runs + 1, queue[0], owner))
    return dealt


def in_turns(taken: Sequence[Line], turns: Iterable[str]) -> list[Line]:
    queues: dict[str, deque[Line]] = defaultdict(deque)
    for line in taken:
        queues[line.batch_id].append(line)
    return [queues[batch_id].popleft() for batch_id in turns if queues[batch_id]]


def _by_batch(named: Iterable[Line]) -> list[tuple[str, list[int]]]:
    keys = sorted({(line.batch_id, line.number) for line in named})
    return [(batch_id, [number for _, number in group]) for batch_id, group in groupby(keys, lambda key: key[0])]


async def _running(connection: AsyncConnection, batch_ids: Sequence[str]) -> Counter[str]:
    run = sa.and_(lines.c.batch_id.in_(batch_ids), lines.c.state == LineState.RUNNING)
    counts = sa.select(lines.c.batch_id, sa.func.count()).where(run).group_by(lines.c.batch_id)
    return Counter({row[0]: row[1] for row in await connection.execute(counts)})


async def _set_states(connection: AsyncConnection, named: Sequence[Line], state: LineState, **values: int) -> None:
    for batch_id, numbers in _by_batch(named):
        for start in range(0, len(numbers), _CHUNK):
            some = sa.and_(lines.c.batch_id == batch_id, lines.c.number.in_(numbers[start : start + _CHUNK]))
            await connection.execute(sa.update(lines).where(some).values(state=state, server=None, **values))


async def _count(connection: AsyncConnection, ended: Sequence[LineResult]) -> None:
    by_batch: dict[str, list[LineResult]] = defaultdict(list)
    for result in ended:
        by_batch[result.line.batch_id].append(result)
    for batch_id, own in sorted(by_batch.items()):
        done = sum(result.state is LineState.DONE for result in own)
        changes = {
            "completed": batches.c.completed + done,
            "failed": batches.c.failed + len(own) - done,
            "prompt_tokens": batches.c.prompt_tokens + sum(result.prompt_tokens for result in own),
            "completion_tokens": batches.c.completion_tokens + sum(result.completion_tokens for result in own),
            "cached_tokens": batches.c.cached_tokens + sum(result.cached_tokens for result in own),
            "result_bytes": batches.c.result_bytes + sum(result.bytes for result in own),
        }
        await connection.execute(sa.update(batches).where(batches.c.id == batch_id).values(changes))


def _line(row: RowMapping, batch: RowMapping) -> Line:
    own = {name: row[name] for name in ("number", "custom_id", "offset", "length", "lost")}
    shared = {name: batch[name] for name in ("owner", "expires_at", "endpoint", "input_file_id")}
    return Line(batch_id=batch["id"], attempt=row["attempt"] + 1, **own, **shared)
