"""WeightTarget: the view of a parameter that a checkpoint's tensor fills, and the part of the tensor that is needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from tok_core.parallel import Slice

FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # as safetensors names them
FLOATS = tuple(FLOAT_DTYPES)
NOT_FINITE = "has NaN or infinities, which cannot be rounded; allowed: finite numbers"
MAX_ROUNDED = 1 << 20  # weights that are rounded at once, if rows can be; a CPU takes thrice as long for 4 million


class BadTensor(Exception):
    """A tensor of a checkpoint has numbers that are not allowed; the message follows the tensor's name."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """Range of the numbers that a tensor may have, as `text` describes it; floating-point numbers are not all 0."""

    low: float
    high: float
    text: str

    def check(self, own: Tensor) -> None:
        """Raise BadTensor if a number is out of range or NaN."""
        if not own.numel():
            return
        low, high = torch.stack(torch.aminmax(own)).tolist()
        if not self.low <= low <= high <= self.high or (own.is_floating_point() and low == high == 0):
            found = f"numbers from {low:g} to {high:g}" if low <= high else "NaN"
            raise BadTensor(f"has {found}; allowed: {self.text}")


MAX_SCALE = torch.finfo(torch.float32).max
SCALES = Allowed(-MAX_SCALE, MAX_SCALE, "finite numbers, not all 0")  # AutoRound writes negative ones for integers
POSITIVE_SCALES = Allowed(0, MAX_SCALE, "finite numbers, none negative, not all 0")
KV_SCALES = Allowed(1e-30, 1e30, "numbers from 1e-30 to 1e30")  # their reciprocals are finite, too


class StoredTensor(Protocol):
    """Tensor of a safetensors file that is not read yet; indexing reads a part of it."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """Parameter view to fill, and the `parts` of the checkpoint's tensor that fill it: one slice for each axis.

    stored_dtypes  dtypes that the checkpoint's tensor may have, as safetensors names them
    convert        makes the view's layout of the part; None: the part has it
    allowed        range of the tensor's numbers; None: any
    """

    view: Tensor
    parts: tuple[Slice, ...]
    stored_dtypes: tuple[str, ...] = FLOATS
    convert: Callable[[Tensor], Tensor] | None = None
    allowed: Allowed | None = None

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

    def fill(self, own: Tensor) -> bool:
        """Copy the part `own` into `view`, converted and cast; return whether all finite values stay finite.

        Raises BadTensor for numbers that are not allowed.
        """
        if self.allowed is not None:
            self.allowed.check(own)
        own = own if self.convert is None else self.convert(own)
        self.view.copy_(own)
        return not self._narrows(own.dtype) or _stays_finite(own, self.view)

    @property
    def is_restricted(self) -> bool:
        """Return whether `fill` may raise BadTensor."""
        return self.allowed is not None

    def narrows(self, stored_dtype: str) -> bool:
        """Return whether `fill` may return False for a tensor of this dtype, as safetensors names it."""
        return stored_dtype in FLOAT_DTYPES and self._narrows(FLOAT_DTYPES[stored_dtype])

    def check(self, own: Tensor) -> bool:
        """Return or raise what `fill` would, and change nothing."""
        if self.allowed is not None:
            self.allowed.check(own)
        return not self._narrows(own.dtype) or _stays_finite(own, own.to(self.view.dtype))

    def _narrows(self, dtype: torch.dtype) -> bool:
        """Return whether the view's dtype has a smaller range than `dtype`."""
        if dtype == self.view.dtype or not dtype.is_floating_point:
            return False
        return torch.finfo(self.view.dtype).max < torch.finfo(dtype).max


def _stays_finite(own: Tensor, cast: Tensor) -> bool:
    return bool((torch.isfinite(cast) | ~torch.isfinite(own).to(cast.device)).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedTarget(WeightTarget):
    """Target of a tensor that stacks the matrices of all experts, of which a rank may hold some: `[E, rows, columns]`.

    pieces  what the matrices of the rank's experts fill, in order, by the names of tensors that would hold one each
    """

    pieces: Mapping[str, WeightTarget]

    @classmethod
    def of(cls, pieces: Mapping[str, WeightTarget], experts: Slice) -> StackedTarget:
        """Return the target that stacks `pieces`, matrices of one shape, equally many of each of the rank's experts."""
        first = next(iter(pieces.values()))
        rows, columns = first.shape
        parts = experts, Slice.whole(len(pieces) // experts.count * rows), Slice.whole(columns)
        return cls(first.view, parts, stored_dtypes=first.stored_dtypes, pieces=pieces)

    def fill(self, own: Tensor) -> bool:
        fits = [piece.fill(piece.part_of(matrix)) for piece, matrix in self._matrices(own)]
        return all(fits)

    @property
    def is_restricted(self) -> bool:
        return any(piece.is_restricted for piece in self.pieces.values())

    def check(self, own: Tensor) -> bool:
        return all(piece.check(piece.part_of(matrix)) for piece, matrix in self._matrices(own))

    def _matrices(self, own: Tensor) -> Iterator[tuple[WeightTarget, Tensor]]:
        rows = next(iter(self.pieces.values())).shape[0]
        return zip(self.pieces.values(), torch.split(own.flatten(0, 1), rows), strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedTarget(WeightTarget):
    """Target of a dense matrix, which is rounded on the device of `view` and never held there whole beside the result.

    quantize    makes the tensors of a checkpoint in the layer's format, by the ends of their names
    tensors     what these tensors fill
    rows_apart  rows are rounded independently: `parts` holds this rank's rows only, and few rows are rounded at once
    """

    quantize: Callable[[Tensor], Mapping[str, Tensor]]
    tensors: Mapping[str, WeightTarget]
    rows_apart: bool

    def fill(self, own: Tensor) -> bool:
        """Round the dense matrix `own`, in any dtype, into the layer's parameters; return True.

        Raises BadTensor for numbers that are not finite.
        """
        rows = max(1, MAX_ROUNDED // own.shape[1]) if self.rows_apart else len(own)
        for start in range(0, len(own), rows):
            stop = min(start + rows, len(own))
            for end, stored in self.quantize(own[start:stop].to(self.view.device)).items():
                target = replace(self.tensors[end], allowed=None)  # checked below, at once
                if self.rows_apart:
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

    def check(self, own: Tensor) -> bool:
        if own.numel() and not all(math.isfinite(one.item()) for one in torch.aminmax(own)):
            raise BadTensor(NOT_FINITE)
        return True
