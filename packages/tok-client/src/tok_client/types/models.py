"""The models that a server serves."""

from __future__ import annotations

from tok_client.types.base import UNSET, Maybe, Wire


class Model(Wire, frozen=True, kw_only=True):
    """One model. `created` is in seconds since 1970."""

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = ""
    shutdown_date: Maybe[str] = UNSET


class ModelList(Wire, frozen=True, kw_only=True):
    """Response of `GET /models`."""

    object: str = "list"
    data: list[Model]
