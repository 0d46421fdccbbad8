"""Choose launch configurations of the attention kernels from a table measured on an H200, by head and element size.

On other devices, calibration measures a few alternatives and overrides the table (`use`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

import torch

# Minimum keys per split: fewer are not worth a program of their own and the pass that merges its result.
DECODE_SPLIT_KEYS = 64
TILE_SPLIT_KEYS = 256
# More partial results than this cost more to merge than they save.
MAX_SPLITS = 128
# Registers a thread for a KV cache of 8-bit elements, see `decode_launch`.
EIGHT_BIT_REGISTERS = 128


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """Launch configuration of an attention kernel.

    rows       query rows of a block (token × query head of a group)
    keys       keys of a block
    warps      Triton's num_warps
    stages     Triton's num_stages (software pipelining)
    programs   programs per multiprocessor that keep it busy
    registers  the compiler's limit of registers per thread; None: no limit
    """

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int
    registers: int | None = None


class Kernel(NamedTuple):
    """Key of the launch table: the kernel, its padded head size, and the bytes of a query element."""

    name: Literal["decode", "tile"]
    padded_head: int
    itemsize: int


MEASURED_ON = "H200"

# (largest padded head size, launch), smallest first.
_DECODE_16_BIT = ((128, AttentionLaunch(16, 32, 1, 2, 16)), (256, AttentionLaunch(16, 32, 2, 2, 4)))
_DECODE_32_BIT = ((64, AttentionLaunch(16, 32, 2, 2, 8)), (256, AttentionLaunch(16, 16, 4, 2, 4)))
_TILE_16_BIT = (
    (64, AttentionLaunch(64, 64, 4, 2, 4, registers=128)),
    (128, AttentionLaunch(64, 64, 4, 2, 3, registers=168)),
    (256, AttentionLaunch(128, 64, 8, 2, 1)),
)
_TILE_32_BIT = ((64, AttentionLaunch(32, 32, 4, 2, 2)), (256, AttentionLaunch(16, 32, 4, 1, 2)))

_found: dict[Kernel, AttentionLaunch] = {}


def use(launches: Mapping[Kernel, AttentionLaunch]) -> None:
    """Launch these kernels with the given configurations in this process, instead of the table's."""
    _found.update(launches)


def remove_override(kernel: Kernel) -> None:
    """Launch the kernel with the table's configuration again."""
    _found.pop(kernel, None)


def decode_launch(padded_head: int, group: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> AttentionLaunch:
    """Return the launch for one program per sequence and key/value head.

    `rows` holds the whole group of query heads.
    """
    launch = _launch(Kernel("decode", padded_head, dtype.itemsize))
    if cache_dtype.itemsize == 1 and launch.warps == 1:
        # Without a limit the compiler uses so many registers for the conversion from 8 bits that fewer programs fit on
        # a multiprocessor.
        launch = replace(launch, registers=EIGHT_BIT_REGISTERS)
    return replace(launch, rows=max(launch.rows, power_of_two(group)))


def tile_launch(padded_head: int, dtype: torch.dtype) -> AttentionLaunch:
    """Return the launch for one program per tile of query rows and key/value head."""
    return _launch(Kernel("tile", padded_head, dtype.itemsize))


def alternatives(kernel: Kernel) -> list[AttentionLaunch]:
    """Return the table's launch, then others that may be faster on another device; few, as each has to be compiled."""
    first = _of_table(kernel)
    if kernel.name == "decode":
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


def splits(programs: int, launch: AttentionLaunch, most_keys: int, least_keys: int, device: torch.device) -> int:
    """Return the number of programs that share one range of at most `most_keys` keys.

    Splitting keeps the GPU busy where only `programs` programs run without it. Each split gets at least `least_keys`
    keys.
    """
    wanted = launch.programs * multiprocessors(device)
    return max(1, min(wanted // max(programs, 1), -(-most_keys // least_keys), MAX_SPLITS))


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Return the device's number of multiprocessors; an H200's where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@lru_cache
def supports_pdl(device: torch.device) -> bool:
    """Return whether a kernel may start before its predecessor ends (programmatic dependent launch, from Hopper on)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Return launch options for a kernel that may start before its predecessor ends, if the predecessor permits it.

    The kernel argument EARLY is True if it may. Every program of such a kernel waits for the predecessor's end
    (`gdc_wait`) before it touches memory that a kernel of the step writes. Thus any later kernel, early or not, finds
    all results before it complete once it has waited itself. `tok_kernels.attention.triton.decode.decode` explains its
    exception.
    """
    return {"PDL": True, "launch_pdl": True} if supports_pdl(device) else {"PDL": False}


def _launch(kernel: Kernel) -> AttentionLaunch:
    return _found.get(kernel) or _of_table(kernel)


def _of_table(kernel: Kernel) -> AttentionLaunch:
    tables = {
        ("decode", False): _DECODE_16_BIT,
        ("decode", True): _DECODE_32_BIT,
        ("tile", False): _TILE_16_BIT,
        ("tile", True): _TILE_32_BIT,
    }
    return _find(tables[kernel.name, kernel.itemsize > 2], kernel.padded_head)


def _find(table: tuple[tuple[int, AttentionLaunch], ...], padded_head: int) -> AttentionLaunch:
    return next(launch for largest, launch in table if padded_head <= largest)
