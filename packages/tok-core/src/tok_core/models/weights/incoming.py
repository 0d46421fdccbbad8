"""Stage a trainer's tensors, checked and sliced to this worker's parts; then write all of them into the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tok_core.errors import ModelError
from tok_core.messages import TENSOR_DTYPES
from tok_core.models.decoder import CausalLM
from tok_core.models.weights.float16 import recast_overflowing_qkv
from tok_core.models.weights.loading import SkippedTensors, canonical_name, format_tensors
from tok_core.models.weights.targets import EMBEDDING, HEAD, stacked_targets, targets
from tok_core.quantization import BadTensor, WeightTarget

SPARE_BYTES = 2 << 30  # device memory that staged tensors leave free, for the next bucket and for quantisation


class IncomingWeights:
    """Staged tensors of one update, which may replace only some of the model's tensors."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model
        self._targets = self._all_targets()
        self._skipped = SkippedTensors(model, self._targets)
        self._staged: dict[str, tuple[str, Tensor]] = {}  # own name: name on the wire, and this worker's part

    def check_metadata(self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[list[int]]) -> None:
        """Raise ModelError for the first tensor that has no place in the model, or a wrong shape or dtype."""
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            target = self._target(name)
            if target is None:
                if canonical_name(name) not in self._skipped:
                    raise ModelError(f"tensor {name} {shape} has no place in the model")
            elif not target.takes(shape):
                raise ModelError(f"tensor {name} has shape {shape}; expected {target.shape}")
            elif TENSOR_DTYPES[dtype] not in target.stored_dtypes:
                allowed = ", ".join(name for name, stored in TENSOR_DTYPES.items() if stored in target.stored_dtypes)
                raise ModelError(f"tensor {name} has dtype {dtype}; supported: {allowed}")

    def stage(self, name: str, tensor: Tensor, *, copy: bool) -> None:
        """Stage this worker's part of a tensor. Raise ModelError for values that its parameter cannot hold.

        copy  False: keep a view, since the caller does not change the tensor before `apply`
        """
        target = self._target(name)
        if target is None:
            return
        part = target.part_of(tensor)
        dtype = self._model.dtype
        may_overflow = target.view.dtype == dtype and target.narrows(TENSOR_DTYPES[str(tensor.dtype)[6:]])
        if may_overflow or target.is_restricted:
            try:
                fits = target.check(part)
            except BadTensor as error:
                raise ModelError(f"tensor {name} {error}") from None
            if may_overflow and not fits:
                largest = torch.finfo(dtype).max
                raise ModelError(
                    f"tensor {name} holds numbers beyond {largest:.0f}, which the model's dtype cannot hold"
                )
        self._staged[canonical_name(name)] = name, _copy(part) if copy else part

    def check(self, *, complete: bool) -> None:
        """Raise ModelError if the staged tensors cannot be applied. `complete`: all of the model must be staged."""
        if EMBEDDING in self._staged and HEAD in self._staged and self._model.config.tied:
            first, second = self._staged[EMBEDDING][1], self._staged[HEAD][1]
            if not torch.equal(first.to(second.device), second):
                raise ModelError(f"{HEAD} differs from {EMBEDDING}, and the model is tied")
        stacked = stacked_targets(self._model)
        pieces = [piece for own in stacked if own in self._staged for piece in stacked[own].pieces]
        twice = next((own for own in pieces if own in self._staged), None)
        if twice is not None:
            raise ModelError(f"tensor {self._staged[twice][0]} comes twice: by itself, and stacked with other experts")
        missing = set(targets(self._model)).difference(self._staged, pieces)
        if self._model.config.tied and HEAD in self._staged:
            missing.discard(EMBEDDING)
        if complete and missing:
            raise ModelError(f"missing tensors: {format_tensors(missing, self._targets)}")
        for name, target in self._partly_replaced().items():
            if type(target) is not WeightTarget or target.convert is not None:
                raise ModelError(f"missing tensor: {name}; a quantised layer's QKV projections and norm come together")

    def apply(self) -> None:
        """Write all staged tensors into the model. All ranks of a stage call this together, after `check`."""
        self._targets = self._all_targets()  # parameters may have moved since they were checked
        kept = {name: target.view.clone() for name, target in self._partly_replaced().items()}
        for own in self._staged:
            self._fill(own, self._targets[self._key(own)])
        for own, target in recast_overflowing_qkv(self._model).items():
            if own in self._staged:
                self._fill(own, target)
            else:
                target.view.copy_(kept[own])

    def _fill(self, own: str, target: WeightTarget) -> None:
        target.fill(self._staged[own][1].to(target.view.device, non_blocking=True))

    def _all_targets(self) -> dict[str, WeightTarget]:
        return {**targets(self._model), **stacked_targets(self._model)}

    def _target(self, name: str) -> WeightTarget | None:
        return self._targets.get(self._key(canonical_name(name)))

    def _key(self, own: str) -> str:
        """Return the name of the target that a tensor fills: a tied model's LM head fills its embedding."""
        return EMBEDDING if own == HEAD and self._model.config.tied else own

    def _partly_replaced(self) -> dict[str, WeightTarget]:
        """Return the unstaged QKV targets of layers whose QKV projection the update may recast."""
        if self._model.dtype != torch.bfloat16:
            return {}
        starts = {own.partition(".self_attn.")[0].removesuffix(".input_layernorm.weight") for own in self._staged}
        unstaged = {}
        for own, target in self._targets.items():
            start, _, end = own.partition(".self_attn.")
            if start in starts and end.startswith(("q_proj", "k_proj", "v_proj")) and own not in self._staged:
                unstaged[own] = target
        return unstaged


def _copy(part: Tensor) -> Tensor:
    """Return a copy on the tensor's device if enough memory is free there, else in page-locked host memory."""
    if part.device.type != "cuda":
        return part.clone()
    if torch.cuda.mem_get_info(part.device)[0] > part.nbytes + SPARE_BYTES:
        return part.clone(memory_format=torch.contiguous_format)
    return torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part, non_blocking=True)
