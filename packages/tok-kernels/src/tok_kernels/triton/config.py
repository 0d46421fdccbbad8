"""How the attention kernels are launched: a table by head size and element size, measured on an H200."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

# Fewer keys than these are not worth a program of their own and the pass that merges its result.
DECODE_SPLIT_KEYS = 64
TILE_SPLIT_KEYS = 256
# More parts than this cost more to join than they save.
MOST_SPLITS = 128


@dataclass(frozen=True, slots=True)
class Launch:
    """`rows` query rows (token × head of a group) and `keys` keys a block; Triton's warps and pipeline stages;
    `programs` a multiprocessor keep it busy; `registers` a thread are the compiler's limit."""

    rows: int
    keys: int
    warps: int
    stages: int
    programs: int
    registers: int | None = None


# (largest padded head size, launch), smallest first.
_DECODE_16_BIT = ((128, Launch(16, 32, 1, 2, 16)), (256, Launch(16, 32, 2, 2, 4)))
_DECODE_32_BIT = ((64, Launch(16, 32, 2, 2, 8)), (256, Launch(16, 16, 4, 2, 4)))
_TILE_16_BIT = (
    (64, Launch(64, 64, 4, 2, 4, registers=128)),
    (128, Launch(64, 64, 4, 2, 3, registers=168)),
    (256, Launch(128, 64, 8, 2, 1)),
)
_TILE_32_BIT = ((64, Launch(32, 32, 4, 2, 2)), (256, Launch(16, 32, 4, 1, 2)))


def decode_launch(padded_head: int, group: int, dtype: torch.dtype) -> Launch:
    """For one program a sequence and key/value head; `rows` holds the whole group of query heads."""
    launch = _find(_DECODE_32_BIT if dtype == torch.float32 else _DECODE_16_BIT, padded_head)
    return replace(launch, rows=max(launch.rows, power_of_two(group)))


def tile_launch(padded_head: int, dtype: torch.dtype) -> Launch:
    """For one program a tile of query rows and key/value head."""
    return _find(_TILE_32_BIT if dtype == torch.float32 else _TILE_16_BIT, padded_head)


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def splits(programs: int, launch: Launch, most_keys: int, least_keys: int, device: torch.device) -> int:
    """How many programs share one range of keys, at most `most_keys`, so that the GPU is busy where there are
    `programs` without a split; each gets at least `least_keys`."""
    wanted = launch.programs * multiprocessors(device)
    return max(1, min(wanted // max(programs, 1), -(-most_keys // least_keys), MOST_SPLITS))


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Of the device; of an H200 where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@lru_cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it ends ("programmatic dependent launch", from Hopper on)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _find(table: tuple[tuple[int, Launch], ...], padded_head: int) -> Launch:
    return next(launch for largest, launch in table if padded_head <= largest)
