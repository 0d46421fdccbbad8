"""Choose launch configurations of the attention kernels by head size and dtype, from a table measured on an H200.

Launches of the table can be overridden in a process. For GPUs in `_CARD_LAUNCHES`, the overrides are listed there. For
all other GPUs, calibration searches a few alternatives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

import torch

# Minimum keys of a split: with fewer, the program and the merge of its result cost more than the split saves.
MIN_DECODE_SPLIT_KEYS = 64
MIN_TILE_SPLIT_KEYS = 256
# Maximum splits of a range of keys: more partial results cost more to merge than they save.
MAX_SPLITS = 128
# Maximum registers per thread with a cache of 8-bit elements; see `decode_launch`.
MAX_REGISTERS_8_BIT_CACHE = 128
_HOPPER_SHARED_BYTES = 227 << 10


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """Launch configuration of an attention kernel.

    rows       query rows of a block (query tokens × query heads of a group)
    keys       keys of a block
    warps      Triton's num_warps
    stages     Triton's num_stages (software pipelining)
    programs   programs that keep a streaming multiprocessor (SM) busy
    registers  Triton's maxnreg, the maximum registers per thread; None: no limit
    """

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int
    registers: int | None = None


KernelName = Literal["decode", "split", "tile"]


class LaunchKey(NamedTuple):
    """Key of the launch table: the kernel, its padded head size, and the bytes of a query element.

    "decode" and "split" are launches of the decode kernel; with "split", it splits the keys of few rows (split-KV).
    "tile" is the varlen kernel.
    """

    name: KernelName
    padded_head: int
    itemsize: int


# (largest padded head size, launch), smallest first.
_DECODE_16_BIT = ((128, AttentionLaunch(16, 32, 1, 2, 16)), (256, AttentionLaunch(16, 32, 2, 2, 4)))
_DECODE_32_BIT = ((64, AttentionLaunch(16, 32, 2, 2, 8)), (256, AttentionLaunch(16, 16, 4, 2, 4)))
# With few rows, each program has more loads in flight. In a CUDA graph of 24 layers, 32 rows of 544 keys took 28.4 µs
# per layer instead of 32.9, and one row 8.2 µs instead of 11.6 (8 heads of 128 elements, H200). With heads of 64
# elements, 8 programs share an SM, which 128 registers allow; without a limit, merging takes 168.
_SPLIT_16_BIT = (
    (64, AttentionLaunch(16, 64, 2, 3, 8, registers=128)),
    (128, AttentionLaunch(16, 64, 2, 3, 4)),
    (256, AttentionLaunch(16, 32, 2, 2, 4)),
)
_TILE_16_BIT = (
    (64, AttentionLaunch(64, 64, 4, 2, 4, registers=128)),
    (128, AttentionLaunch(64, 64, 4, 2, 3, registers=168)),
    (256, AttentionLaunch(128, 64, 8, 2, 1)),
)
_TILE_32_BIT = ((64, AttentionLaunch(32, 32, 4, 2, 2)), (256, AttentionLaunch(16, 32, 4, 1, 2)))

# Launches that were measured to be faster on a GPU than the table's, by a regular expression of CUDA's name of the GPU.
# The H100 SXM has the same SMs as the H200, and as many, so it uses the table for sizes that were measured on the H200
# only. The H100 PCIe, the H100 NVL and MIG slices differ in SMs or memory, so they are not listed.
_CARD_LAUNCHES: dict[str, dict[LaunchKey, AttentionLaunch]] = {
    r"NVIDIA H200( NVL)?": {},
    r"NVIDIA H100 \d+GB HBM3": {
        LaunchKey("decode", 64, 2): AttentionLaunch(16, 32, 4, 2, 16),
        LaunchKey("split", 64, 2): AttentionLaunch(16, 32, 1, 3, 8),
        LaunchKey("tile", 128, 2): AttentionLaunch(64, 64, 4, 2, 3),
    },
}

_overrides: dict[LaunchKey, AttentionLaunch] = {}


def card_launches(card: str) -> Mapping[LaunchKey, AttentionLaunch] | None:
    """Return the launches that override the table's on a GPU, by CUDA's name of the GPU; None: not measured.

    >>> card_launches("NVIDIA H200"), card_launches("NVIDIA H100 PCIe")
    ({}, None)
    """
    return next((launches for name, launches in _CARD_LAUNCHES.items() if re.fullmatch(name, card)), None)


def override_launches(launches: Mapping[LaunchKey, AttentionLaunch]) -> None:
    """Override launches of the table in this process."""
    _overrides.update(launches)


def override_for_card(card: str) -> None:
    """Override launches of the table by those measured on a GPU, if there are any, in this process."""
    override_launches(card_launches(card) or {})


def remove_override(kernel: LaunchKey) -> None:
    """Remove the override of a launch in this process."""
    _overrides.pop(kernel, None)


def decode_launch(
    padded_head: int, group: int, dtype: torch.dtype, cache_dtype: torch.dtype, *, split: bool = False
) -> AttentionLaunch:
    """Return the launch of the decode kernel; its `rows` hold the `group` query heads of a key/value head.

    With `split`, return the launch for few rows whose keys are split.
    """
    launch = _launch(LaunchKey("split" if split else "decode", padded_head, dtype.itemsize))
    if cache_dtype.itemsize == 1 and launch.warps == 1:
        # Without a limit, the conversion from 8 bits takes so many registers that fewer programs fit an SM.
        launch = replace(launch, registers=MAX_REGISTERS_8_BIT_CACHE)
    return replace(launch, rows=max(launch.rows, power_of_two(group)))


def tile_launch(padded_head: int, dtype: torch.dtype) -> AttentionLaunch:
    """Return the launch of the varlen kernel, with one program for each tile of query rows and key/value head."""
    return _launch(LaunchKey("tile", padded_head, dtype.itemsize))


def alternatives(kernel: LaunchKey) -> list[AttentionLaunch]:
    """Return the table's launch and a few others that may be faster on another GPU; calibration compiles them all."""
    first = _table_launch(kernel)
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

    There are `programs` programs without splits. A range has at most `max_keys` keys; a split has at least `min_keys`.
    """
    target = launch.programs * multiprocessors(device)
    return max(1, min(target // max(programs, 1), -(-max_keys // min_keys), MAX_SPLITS))


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Return the device's number of streaming multiprocessors; that of an H200 if the device is not CUDA."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@lru_cache
def supports_pdl(device: torch.device) -> bool:
    """Return whether the device has programmatic dependent launch (PDL), as GPUs since Hopper have.

    The device "meta" counts as a Hopper GPU: launches on meta tensors determine which variants are compiled ahead.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (9, 0)
    return device.type == "meta"


@lru_cache
def max_shared_bytes(device: torch.device) -> int:
    """Return the largest shared memory of a program in bytes; that of a Hopper GPU if the device is no GPU."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]
    return _HOPPER_SHARED_BYTES


def pdl_options(device: torch.device) -> dict[str, bool]:
    """Return the launch options of a kernel that may start before its predecessor ends (PDL).

    The kernel's argument PDL is True on devices that support it. Every program of such a kernel waits until the
    predecessor has ended (`gdc_wait`) before it accesses memory that a kernel of the step writes. So after its own
    wait, a kernel sees the results of all earlier kernels. `tok_kernels.attention.triton.decode` and
    `tok_kernels.moe.triton_gemv` explain the exceptions.
    """
    return {"PDL": True, "launch_pdl": True} if supports_pdl(device) else {"PDL": False}


def _launch(kernel: LaunchKey) -> AttentionLaunch:
    return _overrides.get(kernel) or _table_launch(kernel)


def _table_launch(kernel: LaunchKey) -> AttentionLaunch:
    tables = {
        ("decode", False): _DECODE_16_BIT,
        ("decode", True): _DECODE_32_BIT,
        ("split", False): _SPLIT_16_BIT,
        ("split", True): _DECODE_32_BIT,
        ("tile", False): _TILE_16_BIT,
        ("tile", True): _TILE_32_BIT,
    }
    return _entry_for(tables[kernel.name, kernel.itemsize > 2], kernel.padded_head)


def _entry_for(table: tuple[tuple[int, AttentionLaunch], ...], padded_head: int) -> AttentionLaunch:
    return next(launch for largest, launch in table if padded_head <= largest)
