"""Take the pictures of the console for the documentation, of a server under load, in light and dark.

    python tools/screenshots.py [--out docs/figures] [--all]

It needs Playwright and Chromium (Debian: apt-get install chromium). `--all` also takes every view, and narrow ones.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from PIL import Image
from playwright.async_api import Browser, Page, async_playwright

ROOT = Path(__file__).resolve().parents[1]
# Views by name of the picture, and those of the documentation.
VIEWS = {
    **{"now": "#/now", "request": "#/request/", "timeline": "#/timeline", "memory": "#/memory"},
    **{"objectives": "#/objectives", "forecasts": "#/forecasts", "whatif": "#/whatif", "replicas": "#/replicas"},
}
KEPT = ("now", "request", "timeline")
SIZE, NARROW = {"width": 1200, "height": 860}, {"width": 390, "height": 844}
# Limit for what needs the server, and time in which charts fill.
_SLOW_MS, _SETTLE_MS = 120_000, 6_000
# Intervals of the history in the picture.
MAX_INTERVALS = 24
# Time for which the load runs before the first picture, so that requests wait, are preempted and finish.
WARM_UP_S = 20.0
FEW_SLOTS = ("--max-num-seqs", "4", "--kv-cache-gib", "0.015", "--swap-space", "0.05", "--slo-ttft-ms", "500")
# Jobs that run all the time, and chats per second.
JOBS, CHATS_S = 7, 4


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[str]:
    """Run a server with few slots and little KV, and yield its URL."""
    command = (sys.executable, "-m", "skipjoin", "serve", "tally", "--port", "0", "--batch-dir", "none", *FEW_SLOTS)
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            while "Ready:" not in (text := (folder / "log").read_text()):
                if process.poll() is not None:
                    sys.exit(text)
                await asyncio.sleep(0.2)
            yield text.split("Ready:")[1].split(" at ")[1].split()[0]
        finally:
            process.terminate()
            process.wait()


async def load(url: str) -> None:
    """Send long jobs and short chats until this is canceled."""
    rng = random.Random(1)
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
        asyncio.TaskGroup() as tasks,
    ):

        async def send(name: str, tokens: int, tier: str = "auto") -> None:
            prompt = f"Count from {rng.randrange(100)} to {rng.randrange(100, 1000)}"
            body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "service_tier": tier}
            async with session.post(f"{url}/v1/completions", json=body, headers={"x-request-id": name}) as response:
                await response.read()

        async def repeat(name: str, tier: str) -> None:
            while True:
                await send(name, rng.randint(300, 900), tier)

        for number in range(JOBS):
            tasks.create_task(repeat(f"report-{number}", "auto" if number < JOBS / 2 else "flex"))
        for number in range(1_000_000):
            await asyncio.sleep(rng.expovariate(CHATS_S))
            tasks.create_task(send(f"chat-{number}", rng.randint(8, 80)))


async def often_preempted(url: str) -> str:
    """Return the id of the finished request that waited most often, if its intervals can be told apart."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{url}/debug/histories?since_s=60&most=500") as response,
    ):
        histories = (await response.json())["histories"]
    ended = [one for one in histories if one["ended_at"] is not None and len(one["intervals"]) < MAX_INTERVALS]
    return str(max(ended, key=lambda one: len(one["intervals"]))["id"])


async def take(page: Page, url: str, view: str, path: Path) -> None:
    name = await often_preempted(url) if view == "request" else ""
    await page.goto(f"{url}/console{VIEWS[view]}{name}", timeout=_SLOW_MS)
    await page.locator("main .card").first.wait_for(timeout=_SLOW_MS)
    if view == "whatif":
        await page.click("#simulate")
        await page.get_by_text("replayed").wait_for(timeout=_SLOW_MS)
    if view == "timeline":
        await page.click("#span-15")
        await page.get_by_text("decode tokens,").wait_for(timeout=_SLOW_MS)
    await page.wait_for_selector("#link.live")
    await page.wait_for_timeout(_SETTLE_MS)
    await page.screenshot(path=path)
    Image.open(path).quantize(256).save(path, optimize=True)
    print(path)


async def pictures(browser: Browser, url: str, out: Path, *, takes_all: bool) -> None:
    sizes = {"": SIZE, **({"-narrow": NARROW} if takes_all else {})}
    for suffix, size in sizes.items():
        for scheme in ("light", "dark"):
            settings: dict[str, Any] = {"viewport": size, "color_scheme": scheme, "device_scale_factor": 1.5}
            context = await browser.new_context(**settings)
            for view in VIEWS if takes_all else KEPT:
                end = "" if scheme == "light" else "-dark"
                page = await context.new_page()
                await take(page, url, view, out / f"console-{view}{suffix}{end}.png")
                await page.close()
            await context.close()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/figures")
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        async with serving(Path(folder)) as url, async_playwright() as driver:
            sending = asyncio.create_task(load(url))
            begin = time.monotonic()
            browser = await driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            await asyncio.sleep(max(0.0, begin + WARM_UP_S - time.monotonic()))
            try:
                await pictures(browser, url, args.out, takes_all=args.all)
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                await browser.close()


if __name__ == "__main__":
    asyncio.run(main())
