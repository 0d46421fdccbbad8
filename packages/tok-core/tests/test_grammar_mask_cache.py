"""Masks of allowed tokens are stored once, with what sampling needs to know of them."""

from __future__ import annotations

import numpy as np

from support.schemas import tokens_of as tokens_of_mask
from tok_core.grammar.masks import MaskCache


def test_mask_cache_stores_each_mask_once_with_its_properties() -> None:
    begin = np.array([ord(piece[:1]) if piece else -1 for piece in ["a", "ab", "b", "", *["c"] * 46]], np.int16)
    masks = MaskCache(begin)
    full = masks.of(np.full(2, -1, np.int32))
    assert tokens_of_mask(full.words) == list(range(50))
    assert (full.only, full.none, full.alike) == (-1, False, False)
    chosen = {(0,): (0, True), (0, 1): (-1, True), (0, 2): (-1, False), (0, 1, 3): (-1, False), (3,): (3, False)}
    for tokens, (only, alike) in chosen.items():
        words = np.zeros((3, 2), np.uint32)
        words[:, 0] = sum(1 << token for token in tokens)
        first, second, third = masks.of_many(words.view(np.int32), [None, full, masks.single(1)])
        assert first is second is third
        assert (first.only, first.none, first.alike) == (only, False, alike)
    assert masks.of(np.zeros(2, np.int32)).none
    assert all(tokens_of_mask(masks.single(token).words) == [token] for token in range(50))
