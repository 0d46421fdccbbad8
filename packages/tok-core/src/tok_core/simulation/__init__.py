"""Run the real manager over simulated workers and pipelines, to measure what it costs without a model."""

from __future__ import annotations

from tok_core.simulation.manager import LengthSampler, SimulatedWorker, Simulation

__all__ = [
    "LengthSampler",
    "SimulatedWorker",
    "Simulation",
]
