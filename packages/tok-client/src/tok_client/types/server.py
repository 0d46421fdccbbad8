"""The server's models, health, version, tokenisation and errors."""

from __future__ import annotations

from msgspec import field

from tok_client.types.base import UNSET, JSONObject, Maybe, Wire
from tok_client.types.chat_messages import Message, Tool, ToolChoice


class Model(Wire, frozen=True, kw_only=True):
    """One model. `created` is in seconds since 1970.

    max_model_len  maximum number of tokens of prompt and answer together; OpenAI's reference has no such field
    """

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = ""
    shutdown_date: Maybe[str] = UNSET
    max_model_len: Maybe[int] = UNSET


class ModelList(Wire, frozen=True, kw_only=True):
    """Response of `GET /models`."""

    object: str = "list"
    data: list[Model]


class TokenizeRequest(Wire, frozen=True, kw_only=True):
    """Body of `POST /tokenize`: a text, or the messages of a chat, which the model's template renders as a text.

    OpenAI's reference has no such endpoint; the fields follow vLLM's.

    tool_choice         "none": the template is not shown the tools, as in a chat
    add_special_tokens  adds BOS and EOS tokens; by default for a `prompt` only, since templates write their own

    ValueError (when decoding: msgspec.ValidationError): not exactly one of `prompt` and `messages`.
    """

    model: Maybe[str] = UNSET
    prompt: Maybe[str] = UNSET
    messages: Maybe[list[Message]] = UNSET
    tools: Maybe[list[Tool]] = UNSET
    tool_choice: Maybe[ToolChoice] = UNSET
    add_special_tokens: Maybe[bool] = UNSET
    return_token_strs: Maybe[bool] = UNSET
    add_generation_prompt: Maybe[bool] = UNSET
    continue_final_message: Maybe[bool] = UNSET
    chat_template: Maybe[str] = UNSET
    chat_template_kwargs: Maybe[JSONObject] = UNSET

    def __post_init__(self) -> None:
        has_prompt, has_messages = (field not in (None, UNSET) for field in (self.prompt, self.messages))
        if has_prompt == has_messages:
            problem = "and messages are both set" if has_prompt else "and messages are both missing"
            raise ValueError(f"prompt {problem}; allowed: one of them")
        if self.messages == []:
            raise ValueError("messages is []; allowed: at least one message")


class TokenizeResponse(Wire, frozen=True, kw_only=True):
    """Response of `POST /tokenize`; `token_strs`, if requested, has the text of each token."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Wire, frozen=True, kw_only=True):
    """Body of `POST /detokenize`."""

    model: Maybe[str] = UNSET
    tokens: list[int]


class DetokenizeResponse(Wire, frozen=True, kw_only=True):
    """Response of `POST /detokenize`: the text, including special tokens."""

    prompt: str


class TokenizerInfo(Wire, frozen=True, kw_only=True):
    """Response of `GET /tokenizer_info`: the tokenizer, as its tokenizer_config.json names its parts.

    tokenizer_class   class of the transformers library that reads the same tokenizer.json
    model_max_length  maximum number of tokens of prompt and output together
    chat_template     Jinja source; None: the model has none
    """

    tokenizer_class: str
    model_max_length: int
    chat_template: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None


class LoadReport(Wire, frozen=True, kw_only=True):
    """Response of `GET /load`: the number of prompts whose clients wait for their answers, batch lines excluded."""

    server_load: int


class ReplicaReport(Wire, frozen=True, kw_only=True):
    """One replica of the engine: "ready" or another state, and the reason."""

    state: str
    detail: str = ""


class HealthReport(Wire, frozen=True, kw_only=True):
    """Response of `GET /health`, with status 503 unless the server takes requests."""

    status: str
    detail: str = ""
    replicas: list[ReplicaReport] = field(default_factory=list)


class ReadyReport(Wire, frozen=True, kw_only=True):
    """Response of `GET /ready`, with status 503 unless the server takes requests."""

    ready: bool
    status: str


class VersionReport(Wire, frozen=True, kw_only=True):
    """Response of `GET /version`."""

    version: str


class EngineStatus(Wire, frozen=True, kw_only=True):
    """Response of the endpoints for trainers: "paused", "resumed", "asleep", "awake" or "ok"."""

    status: str


class PausedReport(Wire, frozen=True, kw_only=True):
    """Response of `GET /is_paused`."""

    is_paused: bool


class SleepReport(Wire, frozen=True, kw_only=True):
    """Response of `GET /is_sleeping`."""

    is_sleeping: bool


class IpcMemory(Wire, frozen=True, kw_only=True):
    """Memory of a tensor on a GPU: base64 of its allocation's CUDA IPC handle, and an offset within it in bytes."""

    handle: bytes
    offset: int


class UpdateInfo(Wire, frozen=True, kw_only=True):
    """Tensors of an update, as vLLM names their fields.

    packed                    many tensors are in one broadcast; absent: as `init_info` said
    packed_buffer_size_bytes  a broadcast ends with the tensor that exceeds this size; absent: 1 GiB
    ipc_handles               of each tensor, by the uuid of its GPU, instead of broadcasts: see `export_tensors`
    ipc_handles_pickled       refused: no pickle is read
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    packed: Maybe[bool] = UNSET
    packed_buffer_size_bytes: Maybe[int] = UNSET
    ipc_handles: Maybe[list[dict[str, IpcMemory]]] = UNSET
    ipc_handles_pickled: Maybe[str] = UNSET


class UpdateWeightsRequest(Wire, frozen=True, kw_only=True):
    """Request of `POST /update_weights`: one of `weight_dir`, a directory on the server's host, and `update_info`."""

    weight_dir: Maybe[str] = UNSET
    update_info: Maybe[UpdateInfo] = UNSET
    weight_version: Maybe[str] = UNSET


class InitInfo(Wire, frozen=True, kw_only=True):
    """A trainer's group, as vLLM names its fields. `packed`: what updates that do not say so are."""

    master_address: Maybe[str] = UNSET
    master_port: Maybe[int] = UNSET
    rank_offset: Maybe[int] = UNSET
    world_size: Maybe[int] = UNSET
    packed: bool = False
    packed_buffer_size_bytes: Maybe[int] = UNSET


class InitWeightTransferRequest(Wire, frozen=True, kw_only=True):
    """Request of `POST /init_weight_transfer_engine`. An empty `init_info` is enough for CUDA IPC."""

    init_info: InitInfo


class FinishWeightUpdateRequest(Wire, frozen=True, kw_only=True):
    """Request of `POST /finish_weight_update`."""

    weight_version: Maybe[str] = UNSET


class WorldSize(Wire, frozen=True, kw_only=True):
    """Response of `GET /get_world_size`: a number of workers."""

    world_size: int


class CacheReset(Wire, frozen=True, kw_only=True):
    """Response of `POST /reset_prefix_cache`."""

    success: bool


class WeightVersion(Wire, frozen=True, kw_only=True):
    """Response of `GET /get_weight_version`."""

    weight_version: str


class ErrorBody(Wire, frozen=True, kw_only=True):
    """An error. `param` names the request field at fault, `code` the kind of error for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(Wire, frozen=True, kw_only=True):
    """Body of every error answer, and of the event that ends a failed stream: `{"error": {...}}`."""

    error: ErrorBody
