"""Read the counters of a tok server from its /metrics page."""

from __future__ import annotations

import asyncio
import time

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tok_server.bench.workloads.counters import REQUIRED_COUNTERS, Counters

SETTLE_SECONDS = 2.0  # maximum wait for the server's queued steps


async def counters_of(session: aiohttp.ClientSession, url: str) -> Counters | None:
    """Return the counters of the metrics page at `url` once the server's queued steps have returned.

    None if there is no such page, or if it lacks a counter that only tok servers have.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        page = await _page(session, url)
        counters = {name: page[key] for name in REQUIRED_COUNTERS if (key := f"tok_{name}_total") in page}
        if len(counters) < len(REQUIRED_COUNTERS):
            return None
        counters["replicas"] = page.get("tok_replicas", 1.0)
        if not page.get("tok_steps_in_flight") or time.monotonic() > deadline:
            return counters
        await asyncio.sleep(0.05)


async def _page(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Return the values without labels of a page in Prometheus' text format; empty if there is no such page."""
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=5)) as response:
            page = await response.text() if response.status == 200 else ""
        families = text_string_to_metric_families(page)
        return {one.name: one.value for family in families for one in family.samples if not one.labels}
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):  # ValueError: not in this format, or not UTF-8
        return {}
