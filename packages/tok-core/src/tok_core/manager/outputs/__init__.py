"""Process the outputs of steps: sample progress, stops, prompt log-probabilities, embeddings."""

from __future__ import annotations

from tok_core.manager.outputs.output_processor import NOTHING, OutputProcessor, Reported, merge_reports

__all__ = [
    "NOTHING",
    "OutputProcessor",
    "Reported",
    "merge_reports",
]
