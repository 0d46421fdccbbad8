"""NCCL's unique id is the only object that a trainer's group unpickles."""

from __future__ import annotations

import ctypes
import pickle
from pathlib import Path

import pytest

from tok_core.worker.transfer.trainer_group import read_unique_id


def test_only_nccls_id_is_unpickled() -> None:
    kind = type("ncclUniqueId", (ctypes.Structure,), {"_fields_": [("internal", ctypes.c_byte * 128)]})
    globals()["ncclUniqueId"] = kind
    kind.__module__ = __name__
    one = kind()
    one.internal[3] = 7
    assert read_unique_id(pickle.dumps(one)) == bytes(one)
    for other in (Path("/tmp"), print, b"short", "text"):
        with pytest.raises(pickle.UnpicklingError):
            read_unique_id(pickle.dumps(other))
    with pytest.raises(pickle.UnpicklingError):
        read_unique_id(b"no pickle")
