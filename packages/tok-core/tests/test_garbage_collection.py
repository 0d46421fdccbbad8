"""Tests of the garbage collector's settings in an engine's processes."""

from __future__ import annotations

import gc

from tok_core.runtime import pause_gc


def test_objects_of_a_pause_are_frozen_and_collections_go_on_after_it() -> None:
    collections: list[object] = []

    def note(phase: str, details: object) -> None:
        collections.append(details)

    gc.callbacks.append(note)
    try:
        with pause_gc():
            kept = [[number] for number in range(100_000)]
            assert collections == []
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled()
    assert gc.get_freeze_count() > len(kept)
    assert kept not in gc.get_objects()
