"""Find a model's directory and read its JSON files, without torch."""

from __future__ import annotations

from tok_core.model_files.fields import Fields
from tok_core.model_files.hub import resolve

__all__ = [
    "Fields",
    "resolve",
]
