"""What a report brings is found by request, in whatever order its rows stand."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tok_core.engine.delivery import _grouped


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9) | st.integers(0, 2**60), max_size=40))
def test_rows_are_grouped_by_request_as_numpy_would(rids: list[int]) -> None:
    rid = np.array(rids, np.int64)
    found, which = _grouped(rid)
    expected, inverse = np.unique(rid, return_inverse=True)
    assert found == expected.tolist()
    assert which.tolist() == inverse.tolist()
