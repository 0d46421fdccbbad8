"""Upload a file as a multipart form."""

from __future__ import annotations

import os
from io import BytesIO
from os import PathLike
from typing import IO, TYPE_CHECKING

from tok_client.transport import Call
from tok_client.types import ExpiresAfter, FileObject

if TYPE_CHECKING:
    import aiohttp


def upload(
    file: str | PathLike[str] | bytes, purpose: str, filename: str | None, expires_after: ExpiresAfter | None
) -> Call[FileObject]:
    """Return the call of `POST /files`. The fields precede the file, for servers that read a form as it arrives."""
    fields = {"purpose": purpose}
    if expires_after is not None:
        fields["expires_after[anchor]"] = expires_after.anchor
        fields["expires_after[seconds]"] = str(expires_after.seconds)
    name = filename or ("file.jsonl" if isinstance(file, bytes) else os.path.basename(os.fspath(file)))

    def form() -> aiohttp.FormData:
        import aiohttp

        form_data = aiohttp.FormData(quote_fields=False)
        for field, value in fields.items():
            form_data.add_field(field, value)
        opened: IO[bytes] = BytesIO(file) if isinstance(file, bytes) else open(file, "rb")  # noqa: SIM115 - see below
        form_data.add_field("file", opened, filename=name, content_type="application/octet-stream")  # which closes it
        return form_data

    return Call(method="POST", path="/files", kind=FileObject, form=form)
