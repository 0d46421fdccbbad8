"""Build each step: rows, token budget, pipeline microbatches, run-ahead."""
