"""Files that a server stores: the input and output of batches."""

from __future__ import annotations

from tok_client.types.base import UNSET, Maybe, Wire


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
