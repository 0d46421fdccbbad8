"""Call `WeightTransfer` in a thread and translate its errors, for the endpoints of vLLM and of SGLang."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType

from tok_core import EngineDead, InvalidField, ModelError
from tok_core.runtime import run_in_own_thread
from tok_server.wire import invalid, unavailable

SAME_NAMES: Mapping[str, str] = MappingProxyType({})


async def transfer(
    call: Callable[[], None],
    field: str,
    fields: Mapping[str, str] = SAME_NAMES,
    cancelled: threading.Event | None = None,
) -> None:
    """Run a method of `WeightTransfer` in a thread. Raise ApiError if it fails.

    field      field of the body that errors about tensors and groups name
    fields     argument of the method -> its field in the body, where the names differ
    cancelled  set if the client disconnects
    """
    try:
        await run_in_own_thread(call)
    except asyncio.CancelledError:
        if cancelled is not None:
            cancelled.set()
        raise
    except InvalidField as error:
        name = fields.get(error.field, error.field)
        raise invalid(name, str(error).replace(error.field, name, 1)) from error
    except ModelError as error:
        raise invalid(field, str(error), "weights_refused") from error
    except EngineDead as error:
        raise unavailable(str(error), "engine_unavailable") from error


def torch_dtype(name: str) -> str:
    """Return the name of a dtype without the prefix "torch."."""
    return name.removeprefix("torch.")
