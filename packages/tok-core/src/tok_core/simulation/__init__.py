"""Simulated workers under the real manager, engine and pipeline, to measure what each costs without a model."""
