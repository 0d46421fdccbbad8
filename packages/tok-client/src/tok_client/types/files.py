"""Files that a server keeps: the input of batches, and what came of them."""

from __future__ import annotations

from tok_client.types.base import UNSET, Maybe, Wire


class ExpiresAfter(Wire, frozen=True, kw_only=True):
    """When a file is deleted: so many `seconds` after its `anchor`, which is always "created_at"."""

    anchor: str
    seconds: int


class FileObject(Wire, frozen=True, kw_only=True):
    """One file. `created_at` and `expires_at` are in seconds since 1970, `bytes` is its size.

    `purpose` is "batch" for the input of a batch, "batch_output" for what came of one.
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
    """Response of `GET /files`. `has_more`: ask again with `after` the last id."""

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
