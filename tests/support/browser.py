"""Pages in headless Chromium that record errors and requests to other hosts."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Watched:
    """Page whose console errors and foreign requests are recorded in `problems`."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.problems: list[str] = []
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("dialog", lambda dialog: (self.problems.append(dialog.message), dialog.dismiss()))
        page.on(
            "request",
            lambda request: request.url.startswith((url, "blob:", "data:")) or self.problems.append(request.url),
        )

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.text} ({message.location.get('url')})")

    def barriers(self) -> list[str]:
        from axe_playwright_python.sync_playwright import Axe  # noqa: PLC0415

        found = Axe().run(self.page).response["violations"]
        return [
            f"{violation['id']}: {violation['nodes'][0]['html'][:120]}"
            for violation in found
            if violation["impact"] in ("serious", "critical")
        ]


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """Run a browser. The test is skipped where Chromium or Playwright is missing."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def open_page(browser: Any, url: str, **context: Any) -> Watched:
    return Watched(browser.new_context(**context).new_page(), url)
