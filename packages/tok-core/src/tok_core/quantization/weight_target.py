"""WeightTarget: the view of a parameter that a checkpoint's tensor fills, and the part of the tensor that is needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from tok_core.parallel import Slice

FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # as safetensors names them
FLOATS = tuple(FLOAT_DTYPES)
NOT_FINITE = "has NaN or infinities, which cannot be rounded; allowed: finite numbers"
# Weights quantised at once if rows are independent. A CPU takes three times as long per weight for 4 million.
MAX_QUANTIZED_WEIGHTS = 1 << 20


class BadTensor(Exception):
    """A tensor of a checkpoint has numbers that are not allowed; the message follows the tensor's name."""


@dataclass(frozen=True, slots=True)
class AllowedRange:
    """Range of a tensor's values, described by `text` in errors; floating-point values must not all be 0."""

    low: float
    high: float
    text: str

    def check(self, part: Tensor) -> None:
        """Raise BadTensor if a number is out of range or NaN."""
        if not part.numel():
            return
        low, high = torch.stack(torch.aminmax(part)).tolist()
        if not self.low <= low <= high <= self.high or (part.is_floating_point() and low == high == 0):
            values = f"numbers from {low:g} to {high:g}" if low <= high else "NaN"
            raise BadTensor(f"has {values}; allowed: {self.text}")


MAX_SCALE = torch.finfo(torch.float32).max
SCALES = AllowedRange(-MAX_SCALE, MAX_SCALE, "finite numbers, not all 0")  # AutoRound writes negative ones for integers
POSITIVE_SCALES = AllowedRange(0, MAX_SCALE, "finite numbers, none negative, not all 0")
KV_SCALES = AllowedRange(1e-30, 1e30, "numbers from 1e-30 to 1e30")  # with finite reciprocals


class StoredTensor(Protocol):
    """Tensor of a safetensors file that is not read yet; indexing reads a part of it."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """Parameter view to fill, and the `parts` of the checkpoint's tensor that fill it: one slice for each axis.

    stored_dtypes  dtypes that the checkpoint's tensor may have, as safetensors names them
    convert        converts the part to the view's layout; None: the layouts are the same
    allowed        allowed range of the tensor's values; None: any
    """

    view: Tensor
    parts: tuple[Slice, ...]
    stored_dtypes: tuple[str, ...] = FLOATS
    convert: Callable[[Tensor], Tensor] | None = None
    allowed: AllowedRange | None = None

    @property
    def shape(self) -> list[int]:
        """Return the shape of the checkpoint's tensor."""
        return [part.size for part in self.parts]

    def takes(self, shape: list[int]) -> bool:
        """Return whether a tensor of this shape can be the checkpoint's; a scalar may be stored as a vector of one."""
        return shape == self.shape or (self.shape == [] and shape == [1])

    @property
    def is_whole(self) -> bool:
        """Return whether this worker holds all of the tensor."""
        return all(part.is_whole for part in self.parts)

    def part_of(self, stored: StoredTensor | Tensor) -> Tensor:
        """Return the part of the checkpoint's tensor that fills `view`."""
        return stored[tuple(slice(part.start, part.stop) for part in self.parts)]

    def fill(self, part: Tensor) -> bool:
        """Copy `part` into `view`, converted and cast; return whether all finite values stay finite.

        Raises BadTensor for numbers that are not allowed.
        """
        if self.allowed is not None:
            self.allowed.check(part)
        part = part if self.convert is None else self.convert(part)
        self.view.copy_(part)
        return not self._narrows(part.dtype) or _stays_finite(part, self.view)

    @property
    def is_restricted(self) -> bool:
        """Return whether `fill` may raise BadTensor."""
        return self.allowed is not None

    def narrows(self, stored_dtype: str) -> bool:
        """Return whether `fill` may return False for a tensor of this dtype, as safetensors names it."""
        return stored_dtype in FLOAT_DTYPES and self._narrows(FLOAT_DTYPES[stored_dtype])

    def check(self, part: Tensor) -> bool:
        """Return or raise what `fill` would, and change nothing."""
        if self.allowed is not None:
            self.allowed.check(part)
        return not self._narrows(part.dtype) or _stays_finite(part, part.to(self.view.dtype))

    def _narrows(self, dtype: torch.dtype) -> bool:
        """Return whether the view's dtype has a smaller range than `dtype`."""
        if dtype == self.view.dtype or not dtype.is_floating_point:
            return False
        return torch.finfo(self.view.dtype).max < torch.finfo(dtype).max


def _stays_finite(part: Tensor, cast: Tensor) -> bool:
    return bool((torch.isfinite(cast) | ~torch.isfinite(part).to(cast.device)).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedTarget(WeightTarget):
    """Target of a tensor that stacks the matrices of all experts, `[E, rows, columns]`; a rank may hold some of them.

    pieces   targets of the matrices of this rank's experts, in order, by the names that unstacked checkpoints use
    experts  the rank's experts
    """

    pieces: Mapping[str, WeightTarget]
    experts: Sequence[int]

    @classmethod
    def of(cls, pieces: Mapping[str, WeightTarget], experts: Sequence[int], size: int) -> StackedTarget:
        """Return the target that stacks `pieces`, matrices of one shape, of `experts` out of `size`."""
        first = next(iter(pieces.values()))
        rows, columns = first.shape
        parts = Slice.whole(size), Slice.whole(len(pieces) // len(experts) * rows), Slice.whole(columns)
        return cls(first.view, parts, stored_dtypes=first.stored_dtypes, pieces=pieces, experts=experts)

    @property
    def is_whole(self) -> bool:
        return list(self.experts) == list(range(self.parts[0].size))

    def part_of(self, stored: StoredTensor | Tensor) -> Tensor:
        runs = [[one for _, one in run] for _, run in groupby(enumerate(self.experts), lambda one: one[1] - one[0])]
        parts = [stored[slice(run[0], run[-1] + 1), :, :] for run in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def fill(self, part: Tensor) -> bool:
        fits = [piece.fill(piece.part_of(matrix)) for piece, matrix in self._matrices(part)]
        return all(fits)

    @property
    def is_restricted(self) -> bool:
        return any(piece.is_restricted for piece in self.pieces.values())

    def check(self, part: Tensor) -> bool:
        return all(piece.check(piece.part_of(matrix)) for piece, matrix in self._matrices(part))

    def _matrices(self, part: Tensor) -> Iterator[tuple[WeightTarget, Tensor]]:
        rows = next(iter(self.pieces.values())).shape[0]
        return zip(self.pieces.values(), torch.split(part.flatten(0, 1), rows), strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineQuantizationTarget(WeightTarget):
    """Target of a dense matrix that is quantised while it is loaded, on the device of `view`, a few rows at a time.

    quantize          returns the quantised tensors of a matrix, by the ends of their names in a checkpoint
    tensors           targets of these tensors
    rows_independent  rows are quantised independently: `parts` holds this rank's rows only. Else the matrix is
                      quantised whole
    """

    quantize: Callable[[Tensor], Mapping[str, Tensor]]
    tensors: Mapping[str, WeightTarget]
    rows_independent: bool

    def fill(self, part: Tensor) -> bool:
        """Quantise the dense matrix `part`, in any dtype, into the layer's parameters; return True.

        Raises BadTensor for numbers that are not finite.
        """
        rows = max(1, MAX_QUANTIZED_WEIGHTS // part.shape[1]) if self.rows_independent else len(part)
        for start in range(0, len(part), rows):
            stop = min(start + rows, len(part))
            for end, stored in self.quantize(part[start:stop].to(self.view.device)).items():
                target = replace(self.tensors[end], allowed=None)  # checked below, once for all rows
                if self.rows_independent:
                    parts = Slice.whole(stop - start), *target.parts[1:]
                    target = replace(target, view=target.view[start:stop], parts=parts)
                target.fill(target.part_of(stored))
        try:
            for target in self.tensors.values():
                if target.allowed is not None:
                    target.allowed.check(target.view)
        except BadTensor:
            raise BadTensor(NOT_FINITE) from None
        return True

    @property
    def is_restricted(self) -> bool:
        return True

    def check(self, part: Tensor) -> bool:
        if part.numel() and not all(math.isfinite(extreme.item()) for extreme in torch.aminmax(part)):
            raise BadTensor(NOT_FINITE)
        return True
