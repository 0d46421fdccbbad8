"""Tests that the README's example runs and that its tables and lists are complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tok_kernels

README = Path(__file__).parent.parent / "README.md"


def test_the_example_in_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, str(README), "exec"), {})
    assert re.fullmatch(r"\[\d+, \d+\] torch\.Size\(\[2, 2\]\)\n", capsys.readouterr().out)


def test_the_table_in_the_readme_names_every_operation() -> None:
    named = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", README.read_text(encoding="utf-8"), re.M)))
    members = {name for name in vars(tok_kernels.Backend) if not name.startswith("_")}
    operations = members - {"name", "capturable", "needs_host_lengths", "max_pack_rows"}
    assert set(named) == operations | {"merge_states"}


def test_the_readme_describes_every_backend() -> None:
    assert set(re.findall(r"^- `(\w+)`", README.read_text(encoding="utf-8"), re.M)) == set(tok_kernels.BACKENDS)


def test_tok_kernels_exports_exactly_its_public_names() -> None:
    assert set(tok_kernels.__all__) == {
        "AGE_TOKENS",
        "BACKENDS",
        "AttentionBatch",
        "AttentionShape",
        "Backend",
        "CascadeLevel",
        "Contexts",
        "DecodeRows",
        "DraftRows",
        "DynamicScaling",
        "Exchange",
        "ExpertCopies",
        "ExpertWeights",
        "Filters",
        "HostLengths",
        "HostLevel",
        "KVWrite",
        "LayerCache",
        "LinearScaling",
        "Llama3Scaling",
        "LogitBias",
        "LongRopeScaling",
        "MAX_TILES",
        "MAX_VALUES",
        "Masks",
        "NgramTable",
        "PackedWeight",
        "Penalties",
        "QKNorm",
        "QuantizedRows",
        "RopeScaling",
        "Routing",
        "Sampled",
        "SamplingBatch",
        "ScaledWeight",
        "Shards",
        "SlotColumns",
        "YarnScaling",
        "choose",
        "kv_position_bytes",
        "log_sum_exp",
        "merge_states",
        "pack_columns",
        "rope_rows",
        "rope_table",
        "top_values",
        "write_qkv",
    }
    assert all(hasattr(tok_kernels, name) for name in tok_kernels.__all__)
