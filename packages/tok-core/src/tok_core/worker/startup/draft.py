"""Read and check the draft model, or the EAGLE-3 head, before any weights are read; build it beside the target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from msgspec import structs

from tok_core.config import EngineConfig, RankCoordinates
from tok_core.errors import EngineError, InvalidField, ModelError
from tok_core.model_config import ModelConfig, read_head
from tok_core.models import (
    CausalLM,
    Eagle3LlamaForCausalLM,
    build,
    check_checkpoint,
    model_bytes,
    tensor_names,
    weight_reads,
)
from tok_core.parallel import ShardPlan
from tok_core.quantization import QuantizationConfig, read_quantization
from tok_core.worker.draft_model import draft_bytes_per_token
from tok_core.worker.startup.sizes import resolve_model_config
from tok_kernels import Backend, choose


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Draft model of a worker, before it is built; `local` is the worker's part of `config`."""

    path: Path
    config: ModelConfig
    local: ModelConfig
    coordinates: RankCoordinates
    quantization: QuantizationConfig

    def bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of its weights."""
        return model_bytes(self.config, dtype, self.coordinates, self.quantization)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of a position in its cache."""
        return draft_bytes_per_token(self.local, dtype)

    def share(self, model: ModelConfig, dtype: torch.dtype, quantization: QuantizationConfig) -> float:
        """Return the bytes of weights that a pass reads, as a share of those that a step of `model` reads."""
        whole = RankCoordinates()
        return _reads(self.config, dtype, whole, self.quantization) / _reads(model, dtype, whole, quantization)

    def build(
        self,
        backend: Backend,
        device: torch.device,
        dtype: torch.dtype,
        target: CausalLM,
        fill: Callable[[Path, CausalLM], None],
    ) -> CausalLM:
        """Return the model, filled by `fill`. Raise EngineError if it does not fit into memory."""
        try:
            model = build(self.config, backend, device, dtype, self.coordinates, target.tensor, self.quantization)
        except torch.OutOfMemoryError as error:
            raise EngineError(f"the weights of the draft model {self.path} do not fit on {device}: {error}") from None
        fill(self.path, model)
        if isinstance(model, Eagle3LlamaForCausalLM):
            model.share_embedding(target)
        return model


def read_draft(config: EngineConfig, model: ModelConfig, coordinates: RankCoordinates) -> DraftPlan | None:
    """Return the draft model for the target `model`; None without one. Only JSON files and tensors' names are read.

    It is sharded as the target model, but its experts, if it has any, by their columns. Raises InvalidField for a draft
    model that is not supported, has other tokens, or cannot be sharded so.
    """
    if config.draft is None:
        return None
    path = Path(config.draft)
    coordinates = structs.replace(coordinates, ep=False, redundant_experts=0)
    try:
        head = _read_head(config, path, model)
        draft = head or resolve_model_config(structs.replace(config, model=config.draft), path)
        local = ShardPlan.of(draft, coordinates).local(draft)
        quantization = read_quantization(path, "auto")
        if head is not None and quantization != QuantizationConfig():
            raise ModelError(f"{path}: its weights are quantised ({quantization}); allowed: a dense EAGLE-3 head")
    except ModelError as error:
        raise InvalidField("draft", config.draft, f"a model that tok serves ({error})") from None
    except InvalidField as error:
        raise InvalidField("draft", config.draft, f"a model that fits the engine's other settings ({error})") from None
    _check_vocabulary(config, model.vocab_size, draft.vocab_size if head is None else model.vocab_size)
    return DraftPlan(path, draft, local, coordinates, quantization)


def _read_head(config: EngineConfig, path: Path, model: ModelConfig) -> ModelConfig | None:
    """Return the EAGLE-3 head in directory `path`; None if another model is there.

    A checkpoint without embedding is a head that reads the target model's.
    """
    head = read_head(path, model, config.ignore_config_keys or ())
    if head is None or head.eagle3 is None or config.load_format == "dummy":
        return head
    names, eagle3 = tensor_names(path), head.eagle3
    own_embedding = eagle3.own_embedding or "model.embed_tokens.weight" in names
    maps_tokens = eagle3.maps_tokens or "model.d2t" in names
    return replace(head, eagle3=replace(eagle3, own_embedding=own_embedding, maps_tokens=maps_tokens))


def check_draft_tensors(plan: DraftPlan, dtype: torch.dtype) -> None:
    """Raise ModelError if the checkpoint of the draft model cannot be loaded; load nothing."""
    with torch.device("meta") as meta:
        backend = choose(torch.device("cpu"))
        model = build(plan.config, backend, meta, dtype, plan.coordinates, None, plan.quantization)
    try:
        check_checkpoint(model, plan.path)
    except ModelError as error:
        raise ModelError(f"draft model: {error}") from None


def _check_vocabulary(config: EngineConfig, model_size: int, draft_size: int) -> None:
    """Raise InvalidField if the models have different tokens: other tokenizers, or other sizes where one has none."""
    assert config.draft is not None
    target, own = (_vocabulary(Path(path)) for path in (config.tokenizer or config.model, config.draft))
    if target is None or own is None:
        if draft_size != model_size:
            allowed = f"a model with the same tokens: {model_size}, not {draft_size}"
            raise InvalidField("draft", config.draft, allowed)
        return
    for token in (*target.learned, *own.learned, *(target.added.keys() & own.added.keys())):
        numbers = [one.learned.get(token, one.added.get(token)) for one in (own, target)]
        if numbers[0] != numbers[1]:
            found = f"{token!r} is {numbers[0]} in its tokenizer.json and {numbers[1]} in the model's"
            raise InvalidField("draft", config.draft, f"a model with the same tokens ({found})")


class _Vocabulary(NamedTuple):
    """Ids of the tokens that a tokenizer has learned, and of those added to it, as special tokens are."""

    learned: dict[str, int]
    added: dict[str, int]


class _TokenizerModel(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    model: _TokenizerModel
    added_tokens: list[_AddedToken] = []


def _vocabulary(path: Path) -> _Vocabulary | None:
    """Return the tokens of tokenizer.json in a directory; None if there is no such file."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        tokenizer = msgspec.json.decode(file.read_bytes(), type=_TokenizerFile)
    except msgspec.MsgspecError as error:
        raise ModelError(f"{file}: {error}") from None
    vocab = tokenizer.model.vocab
    if isinstance(vocab, list):  # of a unigram model
        vocab = {token: number for number, (token, _) in enumerate(vocab)}
    return _Vocabulary(vocab, {one.content: one.id for one in tokenizer.added_tokens})


def _reads(
    config: ModelConfig, dtype: torch.dtype, coordinates: RankCoordinates, quantization: QuantizationConfig
) -> float:
    """Return the bytes of parameters that a step of one token reads."""
    dense, experts = weight_reads(config, dtype, coordinates, quantization)
    return dense + (experts * config.moe.experts_per_token / config.moe.experts if config.moe else 0)
