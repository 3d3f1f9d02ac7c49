from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from batch_worlds import OWNER, StoreLocation, add_batch, new_batch, places
from hypothesis import given
from hypothesis import strategies as st

from skipjoin.server.batches.database import DATABASE_FILE, Conflict, SteadyClock, repeated
from skipjoin.server.batches.line_rows import Waiting, deal
from skipjoin.server.batches.records import (
    UNLIMITED,
    BatchStatus,
    FileRow,
    FolderLocked,
    Line,
    LineError,
    LineResult,
    LineState,
    NoSpace,
    OwnerUsage,
    Quota,
    QuotaExceeded,
    ResponseRow,
    StoreError,
    StoreUnavailable,
    new_file_id,
)
from skipjoin.server.batches.store import Store
from skipjoin.server.batches.tables import batches, servers
from support.forks import fork
from support.postgres import Postgres
from support.worlds import exhaustive

pytestmark = pytest.mark.anyio
OTHER = "b" * 64


def result(line: Line, state: LineState = LineState.DONE, tokens: int = 2) -> LineResult:
    body = json.dumps({"custom_id": line.custom_id, "attempt": line.attempt}).encode()
    return LineResult(line=line, state=state, body=body, prompt_tokens=1, completion_tokens=tokens, cached_tokens=1)


def file_of(store: Store, **fields: object) -> FileRow:
    values = {"id": new_file_id(), "owner": OWNER, "purpose": "batch", "filename": "a", "bytes": 10}
    return FileRow(created_at=store.now(), **values | fields)


async def written(store: Store, batch_id: str) -> tuple[list[str], list[str]]:
    """Return the custom_ids in the output file and in the error file."""
    found = [
        [json.loads(body)["custom_id"] async for body in store.batches.results(batch_id, failed=f)]
        for f in (False, True)
    ]
    return found[0], found[1]


async def settle(store: Store, row_id: str, owner: str = OWNER) -> tuple[BatchStatus, list[str], list[str]]:
    """Finalize a due batch, as the runner does, and return its status and the custom_ids in its files."""
    batch = await store.batches.get(owner, row_id)
    if batch.status is BatchStatus.CANCELLING:
        await store.lines.close(row_id, LineState.CANCELLED)
    elif batch.expires_at <= store.now():
        await store.lines.close(row_id, LineState.EXPIRED)
    status = await store.batches.start_finalizing(row_id)
    assert status is not None
    output, error = await written(store, row_id)
    file = file_of(store, owner=owner, purpose="batch_output")
    ended = await store.batches.finalize(row_id, status, file, None)
    assert ended.status is status
    return status, output, error


class Model:
    """Reference model of the store, checked after each of a random sequence of calls and server deaths."""

    def __init__(self, location: StoreLocation, seed: int) -> None:
        self.location = location
        self.random = random.Random(seed)
        self.stores: list[Store] = []
        self.owner: dict[str, str] = {}
        self.total: dict[str, int] = {}
        self.ended: dict[str, dict[int, LineState]] = defaultdict(dict)
        self.attempts: Counter[tuple[str, int]] = Counter()
        self.lost: Counter[tuple[str, int]] = Counter()
        self.taken: list[Line] = []
        self.held: dict[tuple[str, int], tuple[str, int]] = {}
        self.final: set[str] = set()

    async def run(self, steps: int) -> None:
        calls = [self.add, self.take, self.take, self.finish, self.finish, self.finish, self.put_back]
        rare = [self.cancel, self.pass_time, self.settle, self.kill, self.restart]
        for _ in range(steps):
            call = self.random.choice(calls if self.random.random() < 0.8 else rare)
            await call(self.random.choice(self.stores))
            await self.check()
        self.location.clock.seconds = 5e9
        await self.settle(self.stores[0])
        assert self.final == set(self.owner)

    async def add(self, store: Store) -> None:
        owner, count = self.random.choice([OWNER, OTHER]), self.random.randint(1, 9)
        row = await add_batch(store, owner=owner, lines=count, window_s=self.random.randint(5, 500))
        self.owner[row.id], self.total[row.id] = owner, count

    async def take(self, store: Store) -> None:
        now = store.now()
        for line in await store.lines.take(self.random.randint(1, 6)):
            assert line.expires_at > now
            assert line.number not in self.ended[line.batch_id]
            assert (line.batch_id, line.number) not in self.held
            self.attempts[line.batch_id, line.number] += 1
            assert line.attempt == self.attempts[line.batch_id, line.number]
            assert line.lost == self.lost[line.batch_id, line.number]
            self.held[line.batch_id, line.number] = store.server, line.attempt
            self.taken.append(line)

    async def finish(self, store: Store) -> None:
        some = self.random.sample(self.taken, min(len(self.taken), 4))
        states = [self.random.choice([LineState.DONE, LineState.FAILED]) for _ in some]
        valid = self.valid(store, some)
        assert await store.lines.finish([result(*pair) for pair in zip(some, states, strict=True)]) == len(valid)
        for line, state in zip(some, states, strict=True):
            if line in valid:
                self.ended[line.batch_id][line.number] = state
                del self.held[line.batch_id, line.number]

    async def put_back(self, store: Store) -> None:
        taken = self.random.sample(self.taken, min(len(self.taken), 2))
        some = [replace(line, lost=line.lost + self.random.randint(0, 1)) for line in taken]
        await store.lines.put_back(some)
        for line in self.valid(store, some):
            del self.held[line.batch_id, line.number]
            self.lost[line.batch_id, line.number] = line.lost

    def valid(self, store: Store, some: list[Line]) -> list[Line]:
        return [line for line in some if self.held.get((line.batch_id, line.number)) == (store.server, line.attempt)]

    async def cancel(self, store: Store) -> None:
        if self.owner:
            batch_id = self.random.choice(list(self.owner))
            await store.batches.cancel(self.owner[batch_id], batch_id)

    async def pass_time(self, store: Store) -> None:
        # Store time advances even when the clock is set back.
        self.location.clock.seconds += self.random.choice([50, 50, -120])

    async def settle(self, store: Store) -> None:
        for row in await store.batches.due():
            status, output, error = await settle(store, row.id, row.owner)
            ended = self.ended[row.id]
            done = [f"id-{number}" for number, state in sorted(ended.items()) if state is LineState.DONE]
            assert output == done
            assert sorted([*output, *error]) == sorted(f"id-{number + 1}" for number in range(self.total[row.id]))
            if row.status is not BatchStatus.CANCELLING:
                assert (status is BatchStatus.EXPIRED) == (len(ended) < self.total[row.id])
            self.final.add(row.id)
            self.held = {key: held for key, held in self.held.items() if key[0] != row.id}

    async def kill(self, store: Store) -> None:
        await self.leave(store, self.location.kill(store))

    async def restart(self, store: Store) -> None:
        await self.leave(store, store.close())

    async def leave(self, store: Store, leaving: object) -> None:
        await leaving
        self.held = {key: held for key, held in self.held.items() if held[0] != store.server}
        self.stores[self.stores.index(store)] = await self.location.open()

    async def check(self) -> None:
        held = set().union(*[await store.renew() for store in self.stores])
        assert held == {(*key, attempt) for key, (_, attempt) in self.held.items()}
        for batch_id, owner in self.owner.items():
            row = await self.stores[0].batches.get(owner, batch_id)
            states = Counter(self.ended[batch_id].values())
            assert (row.total, row.completed, row.failed) == (
                self.total[batch_id],
                states[LineState.DONE],
                states[LineState.FAILED],
            )
            ended = row.completed + row.failed
            assert (row.completion_tokens, row.cached_tokens) == (2 * ended, ended)
            assert (await self.stores[0].batches.get(OTHER if owner == OWNER else OWNER, batch_id)) is None


@pytest.mark.parametrize("seed", [0, *map(exhaustive, (1, 2, 3))])
async def test_every_line_finishes_exactly_once(location: StoreLocation, seed: int) -> None:
    model = Model(location, seed)
    async with location.opened(servers=2) as stores:
        model.stores = stores
        await model.run(25)


WAITING = st.dictionaries(
    st.sampled_from("abc"), st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=4)
)


@given(WAITING, st.dictionaries(st.sampled_from("abc"), st.integers(0, 5)), st.integers(0, 40))
def test_lines_are_dealt_fairly_to_owners_earliest_expiry_first(
    given: dict[str, list[tuple[int, int]]], runs: dict[str, int], limit: int
) -> None:
    waiting = {
        owner: [Waiting(expiry, seq, f"{owner}{seq}", ready) for seq, (expiry, ready) in enumerate(own)]
        for owner, own in given.items()
    }
    dealt = deal(waiting, Counter(runs), limit)
    ready = {batch.batch_id: batch.ready for own in waiting.values() for batch in own}
    assert len(dealt) == min(limit, sum(ready.values()))
    running = Counter(runs)
    for batch_id in dealt:
        remaining = {owner: [batch for batch in own if ready[batch.batch_id]] for owner, own in waiting.items()}
        best = min((running[owner], min(own), owner) for owner, own in remaining.items() if own)
        assert batch_id == best[1].batch_id
        ready[batch_id] -= 1
        running[best[2]] += 1


async def test_two_servers_never_claim_the_same_line(postgres_location: StoreLocation) -> None:
    async with postgres_location.opened(servers=2) as (first, second):
        await add_batch(first, lines=400)
        taken: list[Line] = []
        while batch := [
            line for part in await asyncio.gather(first.lines.take(16), second.lines.take(16)) for line in part
        ]:
            taken += batch
        assert sorted(line.number for line in taken) == list(range(1, 401))


async def test_server_with_expired_lease_cannot_write_results(postgres_location: StoreLocation) -> None:
    async with postgres_location.opened(servers=2) as (frozen, other):
        row = await add_batch(frozen, lines=2)
        stale = await frozen.lines.take(2)
        unvalidated = await frozen.batches.add(new_batch(frozen))
        assert await frozen.batches.take_unvalidated() == unvalidated
        async with other._db.writing() as connection:
            dead = sa.update(servers).where(servers.c.id == frozen.server)
            await connection.execute(dead.values(lease_until=1.0))
        await other.renew()
        again = await other.lines.take(2)
        assert [line.attempt for line in again] == [2, 2]
        assert await frozen.lines.finish([result(line) for line in stale]) == 0
        assert not await frozen.batches.add_lines(unvalidated.id, places([1]))
        assert not await frozen.renew()
        assert await other.batches.take_unvalidated() == unvalidated
        assert await other.lines.finish([result(line) for line in again]) == 2
        assert (await settle(other, row.id))[1] == ["id-1", "id-2"]


async def test_cancel_during_validation_and_while_running(location: StoreLocation) -> None:
    async with location.opened() as (store,):
        early = await store.batches.add(new_batch(store))
        await store.batches.take_unvalidated()
        assert await store.batches.add_lines(early.id, places([1, 2]))
        cancelled = await store.batches.cancel(OWNER, early.id)
        assert cancelled.status is BatchStatus.CANCELLING
        assert not await store.batches.add_lines(early.id, places([3]))
        assert not await store.batches.begin(early.id, 3)
        assert await store.batches.due() == []
        assert await store.batches.start_finalizing(early.id) is None
        # Validation continues, so that the error file lists every line.
        assert (await store.batches.take_unvalidated(["another model"], runs=False)).id == early.id
        assert await store.batches.add_lines(early.id, places([1, 2, 3]))
        assert await store.batches.begin(early.id, 3)
        assert await store.lines.take(9) == []
        assert [due.id for due in await store.batches.due()] == [early.id]
        assert await settle(store, early.id) == (BatchStatus.CANCELLED, [], ["id-1", "id-2", "id-3"])
        wrong = await store.batches.add(new_batch(store))
        await store.batches.cancel(OWNER, wrong.id)
        assert (await store.batches.take_unvalidated()).id == wrong.id
        assert await store.batches.reject(wrong.id, [LineError(code="invalid_json_line", message="line 1", line=1)])
        found = await store.batches.get(OWNER, wrong.id)
        assert (found.status, found.total, found.errors[0].line) == (BatchStatus.CANCELLED, 0, 1)
        assert found.cancelled_at is not None
        assert await store.batches.take_unvalidated() is None
        late = await add_batch(store, lines=3)
        first, *_ = await store.lines.take(2)
        await store.lines.finish([result(first)])
        await store.batches.cancel(OWNER, late.id)
        assert await store.lines.take(9) == []
        assert await settle(store, late.id) == (BatchStatus.CANCELLED, ["id-1"], ["id-2", "id-3"])
        assert (await store.batches.cancel(OWNER, late.id)).status is BatchStatus.CANCELLED
        assert await store.renew() == frozenset()


async def test_interrupted_validation_and_finalization_resume(location: StoreLocation) -> None:
    async with location.opened(servers=2) as stores:
        store, other = stores[0], stores[-1]
        row = await store.batches.add(new_batch(store))
        assert await store.batches.take_unvalidated() == row
        assert await store.batches.add_lines(row.id, places([1]))
        assert await store.batches.take_unvalidated() == row
        if other is not store:
            assert await other.batches.take_unvalidated() is None
        assert await store.batches.add_lines(row.id, places([1]))
        assert await store.batches.begin(row.id, 1)
        await store.lines.finish([result(line) for line in await store.lines.take(1)])
        assert await store.batches.start_finalizing(row.id) is BatchStatus.COMPLETED
        assert [due.id for due in await store.batches.due()] == [row.id]
        if other is not store:
            assert await other.batches.due() == []
            assert await other.batches.start_finalizing(row.id) is None
        assert (await settle(store, row.id))[:2] == (BatchStatus.COMPLETED, ["id-1"])


async def test_error_message_of_expired_lines(location: StoreLocation) -> None:
    async with location.opened() as (store,):
        row = await add_batch(store, lines=1, window_s=20)
        location.clock.seconds += 100
        assert [due.id for due in await store.batches.due()] == [row.id]
        await store.lines.close(row.id, LineState.EXPIRED)
        (line,) = [json.loads(body) async for body in store.batches.results(row.id, failed=True)]
        assert line.pop("id").startswith("batch_req_")
        assert line == {
            "custom_id": "id-1",
            "response": None,
            "error": {
                "code": "batch_expired",
                "message": "This request could not be executed before the completion window expired.",
            },
        }


async def test_files_belong_to_their_owner_and_expire(location: StoreLocation) -> None:
    async with location.opened() as (store,):
        rows = [file_of(store, filename=f"../{n}", expires_at=store.now() + 3600 + 1000 * n) for n in range(5)]
        for row in rows:
            await store.files.add(row, Quota(50, UNLIMITED))
        with pytest.raises(QuotaExceeded, match="60 bytes with the outputs of its batches, and may have 50"):
            await store.files.add(file_of(store), Quota(50, UNLIMITED))
        assert await store.files.usage_of(OWNER) == OwnerUsage(50, 5)
        assert await store.files.page(OTHER) == ([], False)
        assert await store.files.get(OTHER, rows[0].id) is None
        assert await store.files.delete(OTHER, rows[0].id) is None
        assert await store.files.get(OWNER, "file-\x00") is None
        assert await store.files.page(OWNER, limit=2) == ([rows[4], rows[3]], True)
        assert await store.files.page(OWNER, after=rows[3].id, limit=3) == ([rows[2], rows[1], rows[0]], False)
        assert await store.files.page(OWNER, after=rows[0].id, order="asc", limit=1) == ([rows[1]], True)
        assert await store.files.page(OWNER, purpose="batch_output") == ([], False)
        location.clock.seconds += 4000
        assert (await store.files.page(OWNER))[0] == rows[:0:-1]
        assert await store.files.removable() == [rows[0].id]
        # A batch can still read a deleted input file.
        batch = await store.batches.add(replace(new_batch(store), input_file_id=rows[1].id))
        deleted = await store.files.delete(OWNER, rows[1].id)
        assert deleted.deleted_at >= location.clock.seconds
        assert replace(deleted, deleted_at=None) == rows[1]
        assert await store.files.removable() == [rows[0].id]
        await store.batches.take_unvalidated()
        error = LineError(code="invalid_json_line", message="not JSON", line=7)
        assert await store.batches.reject(batch.id, [error])
        assert (await store.batches.get(OWNER, batch.id)).errors == (error,)
        assert sorted(await store.files.removable()) == sorted([rows[0].id, rows[1].id])
        await store.files.forget([rows[0].id, rows[1].id])
        assert await store.files.known() == {row.id for row in rows[2:]}


async def test_stored_responses_belong_to_their_owner_and_the_oldest_leave(location: StoreLocation) -> None:
    async with location.opened() as (store, *_):
        now = store.now()

        async def add(name: str, *items: str, owner: str = OWNER, size: int = 10, lasts_s: int = 100) -> None:
            row = ResponseRow(
                id=name, owner=owner, size=size, created_at=now, expires_at=now + lasts_s, body=b"x" * size
            )
            await store.responses.add(row, items, Quota(100, 3))

        await add("first", "a", "b")
        await add("others", "a", owner=OTHER)
        await add("second", "b", "c")
        assert await store.responses.containing(OWNER, ["a", "b", "c", "d", "no id"]) == ["first", "second"]
        assert await store.responses.get(OWNER, "others") is None
        assert not await store.responses.delete(OWNER, "others")
        await add("third", size=85)  # with the first it would be 105
        assert [await store.responses.get(OWNER, name) is None for name in ("first", "second", "third")] == [True, 0, 0]
        assert await store.responses.containing(OWNER, "abc") == ["second"]
        with pytest.raises(QuotaExceeded, match="101 bytes"):
            await add("large", size=101)
        for name in ("fourth", "fifth"):
            await add(name, size=1, lasts_s=200)
        assert await store.responses.get(OWNER, "second") is None  # it would be the fourth
        location.clock.seconds += 150
        assert await store.responses.get(OWNER, "third") is None
        await store.responses.sweep()
        assert await store.responses.containing(OTHER, "a") == []
        assert await store.responses.delete(OWNER, "fourth")
        assert await store.responses.get(OWNER, "fourth") is None
        found = await store.responses.get(OWNER, "fifth")
        assert found is not None
        assert found.body == b"x"


async def test_active_batches_and_idempotency_keys_are_per_owner(location: StoreLocation) -> None:
    async with location.opened() as (store,):
        row = await store.batches.add(new_batch(store, metadata={"k": "v\x00"}), "key", max_active=1)
        assert await store.batches.add(new_batch(store), "key", max_active=1) == row
        with pytest.raises(QuotaExceeded, match="1 batches that have not ended, and may have 1"):
            await store.batches.add(new_batch(store), "other", max_active=1)
        theirs = await store.batches.add(new_batch(store, owner=OTHER), "key", max_active=1)
        assert await store.batches.page(OWNER) == ([row], False)
        assert await store.batches.cancel(OWNER, theirs.id) is None
        later = await store.batches.add(new_batch(store))
        assert await store.batches.page(OWNER, limit=1) == ([later], True)
        assert await store.batches.page(OWNER, after=later.id) == ([row], False)
        with pytest.raises(QuotaExceeded, match="2 batches that have not ended"):
            await store.batches.add(new_batch(store), max_active=2)


async def test_batch_runs_only_on_its_model(location: StoreLocation) -> None:
    async with location.opened() as (store,):
        await add_batch(store, lines=2, model="tiny")
        assert await store.lines.take(5, ["large"]) == []
        assert len(await store.lines.take(1, ["tiny"])) == 1
        assert await store.lines.states() == {LineState.READY: 1, LineState.RUNNING: 1}
        await store.batches.add(new_batch(store, model="tiny"))
        assert await store.batches.take_unvalidated(["large"]) is None
        assert await store.batches.states() == {BatchStatus.VALIDATING: 1, BatchStatus.IN_PROGRESS: 1}
        any_model = await store.batches.add(new_batch(store))
        assert await store.batches.take_unvalidated(["large"]) == any_model


async def test_steady_clock_never_goes_back() -> None:
    wall, elapsed = [5000.0], [10.0]
    clock = SteadyClock(lambda: wall[0], lambda: elapsed[0])
    wall[0], elapsed[0] = 100.0, 17.0
    assert clock.now() == 5007.0
    wall[0] = 6000.0
    assert clock.now() == 6000.0
    clock.observe(7000.0)
    elapsed[0] += 1
    assert clock.now() == 7001.0


async def test_store_reopened_after_clock_was_set_back(location: StoreLocation) -> None:
    async with location.opened() as (store,):
        row = await add_batch(store, window_s=20)
    location.clock.seconds -= 1e8
    async with location.opened() as (store,):
        assert row.created_at <= store.now() < row.created_at + 1000
        location.clock.seconds += 1e8 + 100
        assert [due.id for due in await store.batches.due()] == [row.id]


async def test_lease_from_before_database_clock_was_set_back_is_void(postgres_location: StoreLocation) -> None:
    async with postgres_location.opened(servers=2) as (dead, other):
        await add_batch(dead, lines=1)
        await dead.lines.take(1)
        async with other._db.writing() as connection:
            later = sa.update(servers).where(servers.c.id == dead.server)
            await connection.execute(later.values(lease_until=servers.c.lease_until + 3600))
        await other.renew()
        assert len(await other.lines.take(1)) == 1


async def test_migrations_match_table_definitions(location: StoreLocation) -> None:
    async with location.opened() as (store,), store._db.writing() as connection:
        for table in ("responses", "response_items"):
            await connection.execute(sa.text(f"DROP TABLE {table}"))
        await connection.execute(sa.text("UPDATE alembic_version SET version_num = '0001'"))
        assert await connection.run_sync(compare)
    async with location.opened() as (store,), store._db.reading() as connection:
        assert await connection.run_sync(compare) == []


def compare(connection: sa.Connection) -> list[object]:
    return compare_metadata(MigrationContext.configure(connection), batches.metadata)


async def test_newer_database_is_rejected(location: StoreLocation) -> None:
    async with location.opened() as (store,), store._db.writing() as connection:
        await connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(StoreError, match="newer version"):
        await location.open()


async def test_folder_is_locked_by_one_server(tmp_path: Path, postgres_location: StoreLocation) -> None:
    alone = StoreLocation(tmp_path, None)
    async with alone.opened():
        with pytest.raises(FolderLocked, match=str(tmp_path)):
            await alone.open()
        with pytest.raises(FolderLocked):
            await StoreLocation(tmp_path, postgres_location.url).open()
    async with alone.opened(), postgres_location.opened():
        elsewhere = StoreLocation(tmp_path / "elsewhere", postgres_location.url)
        with pytest.raises(StoreError, match="share one folder"):
            await elsewhere.open()


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("mysql://x", "must be a URL that begins with postgresql://"),
        ("nonsense", "must be like postgresql://"),
        ("postgresql://u@127.0.0.1:1/x", "cannot be reached"),
    ],
)
async def test_invalid_database_url_is_rejected(tmp_path: Path, url: str, text: str) -> None:
    with pytest.raises(StoreError, match=text):
        await Store.open(url, tmp_path)


async def test_failed_commit_on_full_disk_changes_nothing(tmp_path: Path) -> None:
    location = StoreLocation(tmp_path, None)
    async with location.opened() as (store,):
        row = await add_batch(store, lines=2)
        first, second = await store.lines.take(2)
        await store.lines.finish([result(first)])
        async with store._db.reading() as connection:
            pages = await connection.scalar(sa.text("PRAGMA page_count"))
            await connection.execute(sa.text(f"PRAGMA max_page_count={pages}"))
            large = replace(result(second), body=b"x" * 1_000_000)
        with pytest.raises(NoSpace, match="full"):
            await store.lines.finish([large])
        found = await store.batches.get(OWNER, row.id)
        assert (found.completed, found.completion_tokens) == (1, 2)
        async with store._db.reading() as connection:
            await connection.execute(sa.text("PRAGMA max_page_count=1000000"))
        assert await store.lines.finish([large]) == 1
        assert (await store.batches.get(OWNER, row.id)).completed == 2


async def test_missing_database_file_is_reported(tmp_path: Path) -> None:
    async with StoreLocation(tmp_path, None).opened() as (store,):
        row = await add_batch(store)
        (tmp_path / DATABASE_FILE).rename(tmp_path / "elsewhere")
        with pytest.raises(StoreUnavailable, match="not in its folder"):
            await store.lines.take(1)
        (tmp_path / "elsewhere").rename(tmp_path / DATABASE_FILE)
        assert (await store.lines.take(1))[0].batch_id == row.id


async def test_store_recovers_after_database_restart(
    postgres: Postgres, postgres_location: StoreLocation, caplog: pytest.LogCaptureFixture
) -> None:
    async with postgres_location.opened() as (store,):
        row = await add_batch(store)
        taken = await store.lines.take(2)
        await asyncio.to_thread(postgres.stop)
        try:
            for call in (store.lines.take(1), store.renew(), store.lines.finish([result(taken[0])])):
                with pytest.raises(StoreUnavailable, match="cannot be reached"):
                    await call
        finally:
            await asyncio.to_thread(postgres.start)
        assert await store.lines.finish([result(line) for line in taken]) == 2
        assert len(await store.lines.take(9)) == 1
        assert (await store.batches.get(OWNER, row.id)).completed == 2
    (warning,) = [record.getMessage() for record in caplog.records if record.name.startswith("skipjoin")]
    assert "Error" in warning or "No such file" in warning


@pytest.mark.parametrize(("state", "kind"), [("53100", NoSpace), ("57P03", StoreUnavailable), ("40P01", Conflict)])
async def test_postgresql_errors_map_to_store_errors(
    postgres_location: StoreLocation, state: str, kind: type[StoreError]
) -> None:
    async with postgres_location.opened() as (store,):

        async def fail() -> None:
            async with store._db.writing() as connection:
                await connection.execute(sa.text(f"DO 'BEGIN RAISE SQLSTATE ''{state}''; END'"))

        with pytest.raises(kind):
            await fail()


async def test_conflicting_transaction_is_retried() -> None:
    failures = [Conflict("busy")] * 4

    @repeated
    async def change() -> str:
        if failures:
            raise failures.pop()
        return "done"

    assert await change() == "done"


async def finish_lines(folder: Path) -> None:
    store = await Store.open(None, folder, clock=lambda: 4e9)
    while taken := await store.lines.take(3):
        await store.lines.finish([LineResult(line=line, state=LineState.DONE, body=b"{}") for line in taken[:2]])
        print(*[line.number for line in taken[:2]], flush=True)


async def test_committed_results_survive_sigkill(tmp_path: Path) -> None:
    location = StoreLocation(tmp_path, None)
    async with location.opened() as (store,):
        row = await add_batch(store, lines=3000)
    printed: list[int] = []
    for kill in range(2):
        own, theirs = os.pipe()
        process = fork("store", os.environ, {theirs: 1}, lambda: asyncio.run(finish_lines(tmp_path)) or 0)
        os.close(theirs)
        with os.fdopen(own) as output:
            for _ in range(5 + 17 * kill):
                printed += map(int, output.readline().split())
            os.kill(process, signal.SIGKILL)
            printed += map(int, output.read().split())
        os.waitpid(process, 0)
    assert len(printed) == len(set(printed)) > 50
    async with location.opened() as (store,):
        found = await store.batches.get(OWNER, row.id)
        # The last group of each process may be committed but not printed.
        assert 0 <= found.completed - len(printed) <= 2 * 2
        remaining = {line.number for line in await store.lines.take(3000)}
        assert len(remaining) == 3000 - found.completed
        assert not remaining & set(printed)


async def test_cancel_during_finalization(location: StoreLocation) -> None:
    """A cancel is too late once finalization has begun; before that the batch becomes cancelled."""
    async with location.opened() as (store, *_):
        late, early = [await add_batch(store, lines=2) for _ in range(2)]
        await store.lines.finish([result(line) for line in await store.lines.take(4)])
        assert await store.batches.start_finalizing(late.id) is BatchStatus.COMPLETED
        file = file_of(store, purpose="batch_output")
        for row, status in ((late, BatchStatus.FINALIZING), (early, BatchStatus.CANCELLING)):
            cancelled = await store.batches.cancel(OWNER, row.id)
            assert cancelled.status is status
        ended = await store.batches.finalize(late.id, BatchStatus.COMPLETED, file, None)
        assert (ended.status, ended.output_file_id, ended.cancelling_at) == (BatchStatus.COMPLETED, file.id, None)
        assert await settle(store, early.id) == (BatchStatus.CANCELLED, ["id-1", "id-2"], [])
        again = await store.batches.cancel(OWNER, early.id)
        assert again.status is BatchStatus.CANCELLED
