"""`sparse_zeros` uses memory only where its array is written."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

from support.own_memory import own_memory
from tok_core.manager.sequences import sparse_zeros

ROWS, WIDTH, USED = 2048, 1 << 17, 100


def test_sparse_zeros_uses_memory_only_for_written_pages() -> None:
    before = own_memory(os.getpid())
    table = sparse_zeros((ROWS, WIDTH))
    table[:, :USED] = np.arange(ROWS)[:, None]
    # Each row touches one page. With huge pages, which NumPy may ask for, it would be the whole table: 1 GiB.
    assert own_memory(os.getpid()) - before < 4 * ROWS * mmap.PAGESIZE
    assert table[-1, USED - 1 : USED + 1].tolist() == [ROWS - 1, 0]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (1, 1), (3, 5)])
def test_sparse_zeros_is_a_writable_int32_array_of_zeros(shape: tuple[int, int]) -> None:
    found = sparse_zeros(shape)
    np.testing.assert_array_equal(found, np.zeros(shape, np.int32))
    assert found.dtype == np.int32
    found += 1
    assert found.sum() == np.prod(shape)
