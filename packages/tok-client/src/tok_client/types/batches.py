"""Files that a server stores, batches of the requests in a file, and the lines of these files."""

from __future__ import annotations

from tok_client.types.base import UNSET, JSONObject, Maybe, Wire


class ExpiresAfter(Wire, frozen=True, kw_only=True):
    """When a file is deleted: `seconds` after its `anchor`, which is always "created_at"."""

    anchor: str
    seconds: int


class FileObject(Wire, frozen=True, kw_only=True):
    """One file. `created_at` and `expires_at` are in seconds since 1970, `bytes` is its size.

    `purpose` is "batch" for the input of a batch, "batch_output" for its output.
    """

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str = "processed"
    expires_at: Maybe[int] = UNSET
    status_details: Maybe[str] = UNSET


class FileList(Wire, frozen=True, kw_only=True):
    """Response of `GET /files`. If `has_more` is set, request the next page with the last id as `after`."""

    object: str = "list"
    data: list[FileObject]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class FileDeleted(Wire, frozen=True, kw_only=True):
    """Response of `DELETE /files/{id}`."""

    id: str
    object: str = "file"
    deleted: bool


class BatchRequest(Wire, frozen=True, kw_only=True):
    """Body of `POST /batches`: how to process an uploaded file.

    completion_window     "24h": lines that are not answered by then expire
    output_expires_after  when the files of answers are deleted; absent: never
    """

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Maybe[dict[str, str]] = UNSET
    output_expires_after: Maybe[ExpiresAfter] = UNSET


class BatchError(Wire, frozen=True, kw_only=True):
    """The reason why a file is refused; `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Wire, frozen=True, kw_only=True):
    """The first errors of a refused file."""

    object: str = "list"
    data: list[BatchError]


class BatchRequestCounts(Wire, frozen=True, kw_only=True):
    """Lines in all, lines answered, and lines that ended with an error."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class InputTokensDetails(Wire, frozen=True, kw_only=True):
    """The number of a batch's prompt tokens that were found in the cache."""

    cached_tokens: int = 0


class OutputTokensDetails(Wire, frozen=True, kw_only=True):
    """The number of generated tokens that are reasoning."""

    reasoning_tokens: int = 0


class BatchUsage(Wire, frozen=True, kw_only=True):
    """Tokens of all answered lines."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Batch(Wire, frozen=True, kw_only=True):
    """One batch. Times are in seconds since 1970; each is null until it is reached.

    `status`: validating, in_progress, finalizing, completed; or failed, expired, cancelling, cancelled.
    """

    id: str
    object: str = "batch"
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str
    created_at: int
    model: Maybe[str] = UNSET
    errors: Maybe[BatchErrors] = None
    output_file_id: Maybe[str] = None
    error_file_id: Maybe[str] = None
    in_progress_at: Maybe[int] = None
    expires_at: Maybe[int] = None
    finalizing_at: Maybe[int] = None
    completed_at: Maybe[int] = None
    failed_at: Maybe[int] = None
    expired_at: Maybe[int] = None
    cancelling_at: Maybe[int] = None
    cancelled_at: Maybe[int] = None
    request_counts: Maybe[BatchRequestCounts] = UNSET
    usage: Maybe[BatchUsage] = UNSET
    metadata: Maybe[dict[str, str]] = None


class BatchList(Wire, frozen=True, kw_only=True):
    """Response of `GET /batches`. If `has_more` is set, request the next page with the last id as `after`."""

    object: str = "list"
    data: list[Batch]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class BatchLine(Wire, frozen=True, kw_only=True):
    """One line of an input file: the body of a request to `url`, and a `custom_id` that is unique in the file."""

    custom_id: str
    method: str = "POST"
    url: str
    body: JSONObject


class BatchResponse(Wire, frozen=True, kw_only=True):
    """The response that the request would have got outside a batch."""

    status_code: int
    request_id: str
    body: JSONObject


class BatchLineError(Wire, frozen=True, kw_only=True):
    """The reason why a line has no response: "batch_expired" or "batch_cancelled"."""

    code: str
    message: str


class BatchAnswer(Wire, frozen=True, kw_only=True):
    """One line of an output or error file, in the order of the input's lines."""

    id: str
    custom_id: str
    response: BatchResponse | None = None
    error: BatchLineError | None = None
