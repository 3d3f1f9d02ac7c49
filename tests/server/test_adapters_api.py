"""Adapters over HTTP: chosen as the model, loaded and unloaded by operators."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from server_worlds import Api, MakeApi

pytestmark = pytest.mark.anyio
KEYS = "[operator=yes]\noperator\n[operator=no]\nclient\n"


async def order(api: Api, what: str, key: str = "", **body: Any) -> Any:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return await api.http.post(f"/v1/{what}_lora_adapter", json=body, headers=headers)


async def load(api: Api, name: str, folder: Path) -> Any:
    return await order(api, "load", lora_name=name, lora_path=str(folder))


async def test_requests_choose_loaded_adapters_by_name(api: Api, tmp_path: Path) -> None:
    card = (await load(api, "sql", tmp_path)).json()
    base = api.service.name
    assert (card["id"], card["parent"], card["root"]) == ("sql", base, "sql")
    models = (await api.http.get("/v1/models")).json()["data"]
    assert [(model["id"], model["parent"]) for model in models] == [(base, None), ("sql", base)]
    assert (await api.http.get("/v1/models/sql")).json() == card
    found = [(await api.complete(model=name, max_tokens=2)).json()["model"] for name in ("sql", base, None)]
    assert found == ["sql", base, base]
    chat = (await api.chat(model="sql")).json()
    message = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "model": "sql"}
    anthropic = (await api.http.post("/v1/messages", json=message)).json()
    assert chat["model"] == anthropic["model"] == "sql"
    assert [add.options.adapter for add in api.engine.added] == [1, 0, 0, 1, 1]
    assert "serves 'tiny', 'sql'" in (await api.complete(model="sq")).text
    assert "skipjoin:adapters 1.0" in (await api.http.get("/metrics")).text
    assert api.service.served_names == (*api.service.names, "sql")


async def test_an_adapter_in_use_is_unloaded_after_its_last_request(api: Api, tmp_path: Path) -> None:
    await load(api, "sql", tmp_path)
    api.engine.paused = True
    running = asyncio.create_task(api.complete(model="sql", max_tokens=3, ignore_eos=True))
    while not api.engine.live:
        await asyncio.sleep(0.001)
    assert (await order(api, "unload", lora_name="sql")).json() == {"id": "sql", "object": "model", "deleted": True}
    assert (await api.complete(model="sql")).status_code == 404
    # Another adapter of this name has another number, so that it finds no KV of the first one.
    await load(api, "sql", tmp_path)
    assert api.engine.adapters == [1, 2]
    api.engine.paused = False
    assert (await running).json()["usage"]["completion_tokens"] == 3
    assert api.engine.adapters == [2]
    assert (await api.complete(model="sql", max_tokens=1)).status_code == 200
    assert [add.options.adapter for add in api.engine.added] == [1, 2]
    assert len({add.options.kv_salt for add in api.engine.added}) == 2


async def test_orders_that_cannot_be_carried_out_are_refused(api: Api, tmp_path: Path) -> None:
    await load(api, "sql", tmp_path)
    refused = [
        await load(api, "other", tmp_path / "none"),
        await load(api, "sql", tmp_path),
        await load(api, api.service.name, tmp_path),
        await load(api, " x", tmp_path),
        await order(api, "load", lora_name="x"),
        await order(api, "unload", lora_name="x"),
    ]
    errors = [(answer.status_code, answer.json()["error"]["param"]) for answer in refused]
    assert errors == [
        *[(400, "lora_path"), (400, "lora_name"), (400, "lora_name"), (400, "lora_name"), (400, "lora_path")],
        (404, "lora_name"),
    ]
    assert "none is not a folder" in refused[0].json()["error"]["message"]
    assert api.engine.adapters == [1]
    assert (await load(api, "other", tmp_path)).status_code == 200


async def test_only_operators_load_adapters(make_api: MakeApi, tmp_path: Path) -> None:
    from skipjoin.config import ServerConfig  # noqa: PLC0415
    from skipjoin.config.access import with_keys_of_files  # noqa: PLC0415

    file = tmp_path / "keys"
    file.write_text(KEYS)
    config = with_keys_of_files(ServerConfig(api_key_file=str(file)))
    async with make_api(api_keys=config.api_keys, key_rights=config.key_rights) as api:
        body = {"lora_name": "sql", "lora_path": str(tmp_path)}
        found = [(await order(api, what, "client", **body)).status_code for what in ("load", "unload")]
        assert found == [403, 403]
        assert (await order(api, "load", "operator", **body)).status_code == 200
    async with make_api(allow_no_key=True) as api:
        assert (await load(api, "sql", tmp_path)).json()["error"]["code"] == "operator_only"


async def test_new_engines_get_the_adapters_that_were_loaded(make_api: MakeApi, tmp_path: Path) -> None:
    async with make_api(replicas=2) as api:
        for name in ("a", "b"):
            await load(api, name, tmp_path)
        await order(api, "unload", lora_name="a")
        first, second = api.engines
        second.die()
        second.adapters.clear()
        second.join(api.ready)
        assert first.adapters == second.adapters == [2]


async def test_adapters_share_the_service_fairly(make_api: MakeApi, tmp_path: Path) -> None:
    async with make_api(fair_by="adapter") as api:
        await load(api, "sql", tmp_path)
        for name in ("sql", None):
            await api.complete(model=name, max_tokens=1, user="x")
        assert [add.options.client for add in api.engine.added] == ["sql", api.service.name]
