"""Pages for browsers: open to all, and without anything from another host."""

from __future__ import annotations

import pytest
from server_worlds import MakeApi

from skipjoin.server.api.page_paths import FILES


@pytest.mark.anyio
async def test_pages_need_no_key_and_allow_nothing_foreign(make_api: MakeApi) -> None:
    async with make_api(api_keys=("right",)) as api:
        for path in FILES:
            found = await api.http.get(path)
            assert found.status_code == 200, path
            policy = found.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "http://" not in found.text.replace("http://www.w3.org/", "")
            assert "https://" not in found.text
            again = await api.http.get(path, headers={"if-none-match": found.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert (await api.http.get("/console/../debug/requests")).status_code == 401
        assert (await api.http.get("/debug/events")).status_code == 401
    async with make_api(console=False) as api:
        assert (await api.http.get("/console")).status_code == 404
