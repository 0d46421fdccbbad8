"""Choose launch configurations of the attention kernels by head and element size, from a table measured on an H200.

Other cards override some of the table's launches (`use`): those in `_CARDS` by launches measured once, all others by
what calibration finds among a few alternatives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

import torch

# Minimum keys of a split. Fewer keys cost more than they save, for a program of their own and the merge of its result.
MIN_DECODE_SPLIT_KEYS = 64
MIN_TILE_SPLIT_KEYS = 256
# Maximum splits of a range of keys. More partial results cost more to merge than they save.
MAX_SPLITS = 128
# Registers per thread with a cache of 8-bit elements, see `decode_launch`.
EIGHT_BIT_REGISTERS = 128


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """Launch configuration of an attention kernel.

    rows       query rows of a block (query tokens × query heads of a group)
    keys       keys of a block
    warps      Triton's num_warps
    stages     Triton's num_stages (software pipelining)
    programs   programs that keep a multiprocessor busy
    registers  the compiler's limit of registers per thread; None: no limit
    """

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int
    registers: int | None = None


KernelName = Literal["decode", "split", "tile"]


class Kernel(NamedTuple):
    """Key of the launch table: the kernel, its padded head size, and the bytes of a query element.

    "split" is the decode kernel where it splits the keys of few rows.
    """

    name: KernelName
    padded_head: int
    itemsize: int


# (largest padded head size, launch), smallest first.
_DECODE_16_BIT = ((128, AttentionLaunch(16, 32, 1, 2, 16)), (256, AttentionLaunch(16, 32, 2, 2, 4)))
_DECODE_32_BIT = ((64, AttentionLaunch(16, 32, 2, 2, 8)), (256, AttentionLaunch(16, 16, 4, 2, 4)))
# Few rows: more of each program's keys are on their way at a time. In a graph of 24 layers, 32 rows of 544 keys took
# 28.4 µs a layer instead of 32.9, one row 8.2 instead of 11.6 (8 heads of 128 elements).
_SPLIT_16_BIT = (
    (64, AttentionLaunch(16, 64, 2, 3, 8)),
    (128, AttentionLaunch(16, 64, 2, 3, 4)),
    (256, AttentionLaunch(16, 32, 2, 2, 4)),
)
_TILE_16_BIT = (
    (64, AttentionLaunch(64, 64, 4, 2, 4, registers=128)),
    (128, AttentionLaunch(64, 64, 4, 2, 3, registers=168)),
    (256, AttentionLaunch(128, 64, 8, 2, 1)),
)
_TILE_32_BIT = ((64, AttentionLaunch(32, 32, 4, 2, 2)), (256, AttentionLaunch(16, 32, 4, 1, 2)))

# Launches that were faster on a card than the table's, by a pattern of the whole name that CUDA gives the card. All
# others are the table's, also for sizes measured on the H200 alone: it has as many multiprocessors of the same kind as
# the H100 with SXM. The H100 for PCIe and the NVL have other numbers or memory, and parts of a card (MIG) do, too.
_CARDS: dict[str, dict[Kernel, AttentionLaunch]] = {
    r"NVIDIA H200( NVL)?": {},
    r"NVIDIA H100 \d+GB HBM3": {
        Kernel("decode", 64, 2): AttentionLaunch(16, 32, 4, 2, 16),
        Kernel("split", 64, 2): AttentionLaunch(16, 32, 1, 3, 8),
        Kernel("tile", 128, 2): AttentionLaunch(64, 64, 4, 2, 3),
    },
}

_found: dict[Kernel, AttentionLaunch] = {}


def launches_of(card: str) -> Mapping[Kernel, AttentionLaunch] | None:
    """Return the launches that replace the table's on a card, by the name that CUDA gives it; None: not measured.

    >>> launches_of("NVIDIA H200"), launches_of("NVIDIA H100 PCIe")
    ({}, None)
    """
    return next((launches for name, launches in _CARDS.items() if re.fullmatch(name, card)), None)


def use(launches: Mapping[Kernel, AttentionLaunch]) -> None:
    """Launch the kernels with the given configurations instead of the table's, in this process."""
    _found.update(launches)


def use_card(card: str) -> None:
    """Launch the kernels with the configurations measured on a card, if there are any, in this process."""
    use(launches_of(card) or {})


def remove_override(kernel: Kernel) -> None:
    """Launch the kernel with the table's configuration again."""
    _found.pop(kernel, None)


def decode_launch(
    padded_head: int, group: int, dtype: torch.dtype, cache_dtype: torch.dtype, *, split: bool = False
) -> AttentionLaunch:
    """Return the launch of the decode kernel, whose `rows` hold the whole group of query heads.

    With `split`, it is for few rows whose keys are split.
    """
    launch = _launch(Kernel("split" if split else "decode", padded_head, dtype.itemsize))
    if cache_dtype.itemsize == 1 and launch.warps == 1:
        # Without a limit, the conversion from 8 bits takes so many registers that fewer programs fit a multiprocessor.
        launch = replace(launch, registers=EIGHT_BIT_REGISTERS)
    return replace(launch, rows=max(launch.rows, power_of_two(group)))


def tile_launch(padded_head: int, dtype: torch.dtype) -> AttentionLaunch:
    """Return the launch of the varlen kernel, which has one program for each tile of query rows and key/value head."""
    return _launch(Kernel("tile", padded_head, dtype.itemsize))


def alternatives(kernel: Kernel) -> list[AttentionLaunch]:
    """Return the table's launch, and a few others that may be faster on another device; each has to be compiled."""
    first = _of_table(kernel)
    if kernel.name != "tile":
        others = [
            replace(first, keys=keys, warps=warps, stages=stages)
            for keys, warps, stages in ((32, 1, 3), (64, 2, 2), (32, 2, 3), (32, 4, 2), (16, 1, 2))
        ]
    else:
        others = [
            replace(first, rows=rows, keys=keys, warps=warps, stages=stages, registers=None)
            for rows, keys, warps, stages in ((64, 64, 4, 2), (128, 64, 8, 2), (64, 32, 4, 2), (32, 32, 4, 2))
        ]
    return [first, *(other for other in others if other != first)]


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def splits(programs: int, launch: AttentionLaunch, max_keys: int, min_keys: int, device: torch.device) -> int:
    """Return the number of splits of each range of keys that keeps the GPU busy.

    Without splits there are `programs` programs. A range has at most `max_keys` keys, and a split at least `min_keys`.
    """
    target = launch.programs * multiprocessors(device)
    return max(1, min(target // max(programs, 1), -(-max_keys // min_keys), MAX_SPLITS))


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Return the device's number of multiprocessors; an H200's number if the device is not CUDA."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@lru_cache
def supports_pdl(device: torch.device) -> bool:
    """Return whether a kernel may start before its predecessor ends (programmatic dependent launch, since Hopper).

    Tensors of the device "meta" stand for those of a Hopper GPU: their launches only say what has to be compiled.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (9, 0)
    return device.type == "meta"


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Return launch options for a kernel that may start before its predecessor ends, if the predecessor permits it.

    The kernel's argument PDL is True on devices with programmatic dependent launch. Every program of the kernel waits
    for the predecessor's end (`gdc_wait`) before it touches memory that a kernel of the step writes. So any later
    kernel finds the results of all kernels before it complete, once it has waited itself. Two exceptions are
    explained in `tok_kernels.attention.triton.decode`.
    """
    return {"PDL": True, "launch_pdl": True} if supports_pdl(device) else {"PDL": False}


def _launch(kernel: Kernel) -> AttentionLaunch:
    return _found.get(kernel) or _of_table(kernel)


def _of_table(kernel: Kernel) -> AttentionLaunch:
    tables = {
        ("decode", False): _DECODE_16_BIT,
        ("decode", True): _DECODE_32_BIT,
        ("split", False): _SPLIT_16_BIT,
        ("split", True): _DECODE_32_BIT,
        ("tile", False): _TILE_16_BIT,
        ("tile", True): _TILE_32_BIT,
    }
    return _find(tables[kernel.name, kernel.itemsize > 2], kernel.padded_head)


def _find(table: tuple[tuple[int, AttentionLaunch], ...], padded_head: int) -> AttentionLaunch:
    return next(launch for largest, launch in table if padded_head <= largest)
