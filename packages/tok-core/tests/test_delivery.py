"""The rows of a report are grouped by request, in any order of the rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tok_core.engine.output_router import _grouped


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9) | st.integers(0, 2**60), max_size=40))
def test_report_rows_are_grouped_by_request_like_numpy_unique(rids: list[int]) -> None:
    rid = np.array(rids, np.int64)
    found, which = _grouped(rid)
    expected, inverse = np.unique(rid, return_inverse=True)
    assert found == expected.tolist()
    assert which.tolist() == inverse.tolist()
