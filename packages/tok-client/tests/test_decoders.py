"""Test that decoders can be made in many threads at once."""

from __future__ import annotations

import subprocess
import sys

from support.patience import PATIENCE

TOGETHER = """
import sys, threading
import msgspec
from tok_client.decoders import decoder

sys.setswitchinterval(1e-6)
for turn in range(150):
    inner = [msgspec.defstruct(f"Inner{n}", [("a", int), ("b", "list[str] | None", None)]) for n in range(8)]
    kind = msgspec.defstruct("Outer", [(f"m{n}", one | None, None) for n, one in enumerate(inner)])
    start, found = threading.Barrier(6), []

    def decode():
        start.wait()
        found.append(decoder(kind).decode(b'{"m3": {"a": 1, "b": ["x"]}}'))

    threads = [threading.Thread(target=decode) for _ in range(6)]
    [one.start() for one in threads]
    [one.join() for one in threads]
    assert len(found) == 6 and all(one.m3.a == 1 for one in found)
"""


def test_decoders_of_a_new_type_can_be_made_in_many_threads() -> None:
    # Run in a process of its own: without the lock, msgspec would crash the process.
    subprocess.run([sys.executable, "-c", TOGETHER], check=True, timeout=PATIENCE)
