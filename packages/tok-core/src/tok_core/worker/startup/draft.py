"""Read and check the draft model, or EAGLE-3 head, before any weights are loaded; build it beside the target model."""

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
from tok_core.worker.startup.resolve import resolve_model_config
from tok_kernels import Backend, choose


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Draft model of a worker, before it is built.

    path    directory of its checkpoint
    config  config of the whole draft model; `local` is that of this worker's shard
    """

    path: Path
    config: ModelConfig
    local: ModelConfig
    coordinates: RankCoordinates
    quantization: QuantizationConfig

    def bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of this worker's weights of the draft model."""
        return model_bytes(self.config, dtype, self.coordinates, self.quantization)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Return the bytes of one position in the draft model's cache on this worker."""
        return draft_bytes_per_token(self.local, dtype)

    def weight_share(self, target: ModelConfig, dtype: torch.dtype, quantization: QuantizationConfig) -> float:
        """Return the bytes of weights that a pass of one token reads, divided by those that the target model reads."""
        return _weight_bytes_read(self.config, dtype, self.quantization) / _weight_bytes_read(
            target, dtype, quantization
        )

    def build(
        self,
        backend: Backend,
        device: torch.device,
        dtype: torch.dtype,
        target: CausalLM,
        fill: Callable[[Path, CausalLM], None],
    ) -> CausalLM:
        """Return the draft model, filled by `fill(path, model)`. Raise EngineError if it does not fit into memory.

        An EAGLE-3 head without an embedding of its own gets that of the target model.
        """
        try:
            model = build(self.config, backend, device, dtype, self.coordinates, target.tensor, self.quantization)
        except torch.OutOfMemoryError as error:
            raise EngineError(f"the weights of the draft model {self.path} do not fit on {device}: {error}") from None
        fill(self.path, model)
        if isinstance(model, Eagle3LlamaForCausalLM):
            model.share_embedding(target)
        return model


def read_draft(config: EngineConfig, model: ModelConfig, coordinates: RankCoordinates) -> DraftPlan | None:
    """Return the draft model that `config.draft` names; None without one. Only JSON files and tensors' names are read.

    The draft model is sharded as the target model `model`, but without expert parallelism. Raises InvalidField for a
    draft model that is not supported, has other tokens than the target model, or cannot be sharded in this way.
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
    """Return the config of the EAGLE-3 head in directory `path`; None if the directory has another model.

    The names of the checkpoint's tensors decide whether the head has its own embedding and its own token ids.
    """
    head = read_head(path, model, config.ignore_config_keys or ())
    if head is None or head.eagle3 is None or config.load_format == "dummy":
        return head
    names, eagle3 = tensor_names(path), head.eagle3
    own_embedding = eagle3.own_embedding or "model.embed_tokens.weight" in names
    maps_tokens = eagle3.maps_tokens or "model.d2t" in names
    return replace(head, eagle3=replace(eagle3, own_embedding=own_embedding, maps_tokens=maps_tokens))


def check_draft_tensors(plan: DraftPlan, dtype: torch.dtype) -> None:
    """Raise ModelError if tensors of the draft model's checkpoint are missing or misshapen; load nothing."""
    with torch.device("meta") as meta:
        backend = choose(torch.device("cpu"))
        model = build(plan.config, backend, meta, dtype, plan.coordinates, None, plan.quantization)
    try:
        check_checkpoint(model, plan.path)
    except ModelError as error:
        raise ModelError(f"draft model: {error}") from None


def _check_vocabulary(config: EngineConfig, model_size: int, draft_size: int) -> None:
    """Raise InvalidField if a token has different ids in the two models.

    The models' tokenizer.json files are compared; without both, only the sizes of the vocabularies are.
    """
    assert config.draft is not None
    target, draft = (_read_vocabulary(Path(path)) for path in (config.tokenizer or config.model, config.draft))
    if target is None or draft is None:
        if draft_size != model_size:
            allowed = f"a model with the same tokens: {model_size}, not {draft_size}"
            raise InvalidField("draft", config.draft, allowed)
        return
    for token in (*target.learned, *draft.learned, *(target.added.keys() & draft.added.keys())):
        draft_id, target_id = (one.learned.get(token, one.added.get(token)) for one in (draft, target))
        if draft_id != target_id:
            found = f"{token!r} is {draft_id} in its tokenizer.json and {target_id} in the model's"
            raise InvalidField("draft", config.draft, f"a model with the same tokens ({found})")


class _Vocabulary(NamedTuple):
    """Token ids of a tokenizer: of tokens that it has learned, and of added tokens, such as special tokens."""

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


def _read_vocabulary(path: Path) -> _Vocabulary | None:
    """Return the tokens of the tokenizer.json in directory `path`; None if there is no such file."""
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        tokenizer = msgspec.json.decode(file.read_bytes(), type=_TokenizerFile)
    except msgspec.MsgspecError as error:
        raise ModelError(f"{file}: {error}") from None
    vocab = tokenizer.model.vocab
    if isinstance(vocab, list):  # a unigram model lists tokens and scores in order of ids
        vocab = {token: token_id for token_id, (token, _) in enumerate(vocab)}
    return _Vocabulary(vocab, {one.content: one.id for one in tokenizer.added_tokens})


def _weight_bytes_read(config: ModelConfig, dtype: torch.dtype, quantization: QuantizationConfig) -> float:
    """Return the bytes of weights that a step of one token reads, on all workers of a model together."""
    dense, experts = weight_reads(config, dtype, RankCoordinates(), quantization)
    return dense + (experts * config.moe.experts_per_token / config.moe.experts if config.moe else 0)
