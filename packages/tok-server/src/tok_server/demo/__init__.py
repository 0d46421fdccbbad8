"""The embedded demo model: a small Llama that solves templated word problems, step by step."""

from __future__ import annotations

from pathlib import Path

__all__ = ["HELD_OUT_FILE", "MODEL_DIR"]

MODEL_DIR = Path(__file__).parent / "model"
"""Directory of the model in Hugging Face's layout."""

HELD_OUT_FILE = Path(__file__).parent / "held_out.jsonl"
"""Problems that training never sees, one `{"question", "answer"}` per line."""
