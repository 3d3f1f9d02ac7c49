"""Fixtures for an API over a scripted engine in this process, and for servers in their own processes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from batch_worlds import StoreLocation
from forked_servers import start_parent_of_models
from server_worlds import BLOCKS, Api, MakeApi, ServerProcess, StartServer, simulated_server

from skipjoin.config import ServerConfig
from skipjoin.engine.forecasting import ForecastKeeper
from support.postgres import Postgres, running


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    start_parent_of_models()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write_tokenizer(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def make_api(tokenizer_folder: Path) -> MakeApi:
    """Return a function that creates an `Api` with the given `ServerConfig` settings and forecast keeper."""

    @contextlib.asynccontextmanager
    async def make(keeper: ForecastKeeper | None = None, **settings: Any) -> AsyncIterator[Api]:
        api = Api(tokenizer_folder, ServerConfig(**settings), keeper)
        async with api.http:
            yield api
        if api.questions is not None:
            await api.questions.close()
        api.service.close()

    return make


@pytest.fixture
async def api(make_api: MakeApi) -> AsyncIterator[Api]:
    async with make_api() as found:
        yield found
        assert found.is_clean()


@pytest.fixture
def start_server(tokenizer_folder: Path) -> Iterator[StartServer]:
    started: list[ServerProcess] = []

    def start(step_s: float = 0.001, blocks: int = BLOCKS, **settings: Any) -> ServerProcess:
        started.append(simulated_server(tokenizer_folder, step_s, blocks, **settings))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def server(tokenizer_folder: Path) -> Iterator[ServerProcess]:
    """Shared server over the simulated engine, which each test must leave idle."""
    shared = simulated_server(tokenizer_folder, 0.001, BLOCKS)
    yield shared
    shared.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "postgres" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.postgres)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with running() as server:
        if server is None:
            pytest.skip("PostgreSQL is not installed")
        yield server


@pytest.fixture
def postgres_location(postgres: Postgres, tmp_path: Path) -> StoreLocation:
    return StoreLocation(tmp_path / "shared", postgres.new_database())


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> StoreLocation:
    if request.param == "sqlite":
        return StoreLocation(tmp_path / "own", None)
    return request.getfixturevalue("postgres_location")
