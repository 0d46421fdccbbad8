"""The comparison of weight formats: the stored model diverges from itself by nothing, coarser formats by more."""

from __future__ import annotations

import pytest
from demo_training import compare_formats
from demo_training.compare_formats import FORMATS, compare

from tok_server.demo import MODEL_DIR


def test_formats_are_compared_with_the_stored_model() -> None:
    rows = {row.name: row for row in compare(MODEL_DIR, 3, 4, 0.8, 0, device="cpu", dtype="float32")}
    assert list(rows) == list(FORMATS)
    assert rows["as stored"].divergence == 0
    divergences = [rows[name].divergence for name in ("as stored", "int8", "fp8", compare_formats.INT4)]
    assert divergences == sorted(divergences)
    assert 0 < divergences[1] < divergences[3] < 0.1
    assert 0 < rows["int8 KV cache"].divergence < rows["fp8 KV cache"].divergence < 0.1
    for row in rows.values():
        assert [one.k for one in row.coverage] == [1, 2, 4]
        assert 0 <= row.coverage[0].mean <= row.coverage[-1].mean <= 1


def test_main_prints_a_table_in_markdown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compare_formats, "FORMATS", {"as stored": {}})
    monkeypatch.setattr("sys.argv", ["compare_formats", "--problems", "2", "--samples", "2", "--device", "cpu"])
    compare_formats.main()
    heading, rule, row = capsys.readouterr().out.splitlines()
    assert heading == "| format | pass@1 | pass@2 | KL, nats a token |"
    assert rule == "|---|---|---|---|"
    assert row.startswith("| as stored | ")
    assert row.endswith("%) | 0 ± 0 |")
