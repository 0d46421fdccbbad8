"""Tests of the package's exceptions."""

from __future__ import annotations

import pickle

import pytest

from tok_core import ContextLengthExceeded, EngineDead, InvalidField, TokError
from tok_core.errors import Amount


@pytest.mark.parametrize(
    "error",
    [
        InvalidField("n", 0, "integers from 1"),
        ContextLengthExceeded("prompt", Amount("9 tokens"), "at most 8", 8),
        EngineDead("the worker died", min_open_priority=3),
    ],
)
def test_errors_can_be_pickled(error: TokError) -> None:
    copied = pickle.loads(pickle.dumps(error))  # as a pool of processes does with the errors of its tasks
    assert (type(copied), str(copied), vars(copied)) == (type(error), str(error), vars(error))
