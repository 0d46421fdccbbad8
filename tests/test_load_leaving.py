"""Clients that leave under load: every other answer is whole, and nothing is kept for those who left."""

from __future__ import annotations

from support.leaving_clients import load, served

COUNT, CONCURRENCY = 600, 200


async def test_a_tenth_of_the_clients_leaves_and_nobody_else_notices() -> None:
    with served() as server:
        await load(server, CONCURRENCY, CONCURRENCY, first_seed=10**6)
        before = server.memory()
        tally = await load(server, COUNT, CONCURRENCY)  # returns once no page, slot or connection is held
        assert set(tally.ends) <= {"whole", "left"}, tally.ends
        assert sum(tally.ends.values()) == COUNT
        assert tally.ends["left"] > 0
        assert tally.metrics["tok_restarts_total"] == 0
        assert server.memory() < before + (64 << 20)
