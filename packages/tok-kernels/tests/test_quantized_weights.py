"""Tests of the layout of packed integer weights and of the reference that dequantises them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from support.noise import noise
from tok_kernels import MAX_TILES, PackedWeight, choose, pack_columns
from tok_kernels.linear.quantized_weights import unpack_columns

CPU = torch.device("cpu")


@given(bits=st.sampled_from([4, 8]), rows=st.integers(0, 4), columns=st.integers(0, 200), seed=st.integers(0, 99))
def test_unpacked_words_are_the_integers_that_were_packed(bits: int, rows: int, columns: int, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 1 << bits, (rows, columns), generator=source, dtype=torch.int32)
    words = pack_columns(q, bits)
    assert words.dtype == torch.int32
    assert words.shape == (rows, -(-columns * bits // 128) * 4)
    unpacked = unpack_columns(words, bits)
    assert torch.equal(unpacked[:, :columns], q)
    assert not unpacked[:, columns:].any()


def test_words_hold_the_columns_that_the_docstring_names() -> None:
    def columns(word: int, bits: int) -> list[int]:
        """Return the columns of a word, by setting one column after the other, in the order of their bits."""
        size = 128 // bits
        single = torch.eye(size, dtype=torch.int32)
        of_column = [pack_columns(single[column], bits)[word].item() for column in range(size)]
        found = {int(value) & 0xFFFFFFFF: column for column, value in enumerate(of_column) if value}
        return [found[bit] for bit in sorted(found)]

    assert columns(0, 4) == [0, 8, 16, 24, 1, 9, 17, 25]
    assert columns(3, 4) == [6, 14, 22, 30, 7, 15, 23, 31]
    assert columns(1, 8) == [2, 10, 3, 11]


def test_reference_multiplies_by_the_dequantised_weight() -> None:
    q = torch.arange(16, dtype=torch.int32).repeat(4, 5)
    scale, zero = noise(3, 4, device=CPU), torch.tensor([[3, 0, 15, 8]] * 3, dtype=torch.uint8)
    counters = torch.zeros(MAX_TILES, dtype=torch.int32)
    weight = PackedWeight(pack_columns(q, 4), scale, zero, 4, 80, 32, torch.float32, counters)
    dense = torch.stack([(q[:, k] - zero[k // 32].int()) * scale[k // 32] for k in range(80)], 1)
    backend, x = choose(CPU), noise(3, 80, device=CPU)
    assert torch.equal(backend.dequantize(weight), dense)
    assert torch.equal(backend.packed_linear(x, weight), functional.linear(x, dense))
    gate, up = functional.linear(x, dense).chunk(2, 1)
    torch.testing.assert_close(backend.packed_gated_linear(x, weight), functional.silu(gate) * up)
