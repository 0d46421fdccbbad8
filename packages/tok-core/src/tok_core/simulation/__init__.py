"""Run the real manager or engine over simulated workers, to measure what each costs without a model."""

from __future__ import annotations

from tok_core.simulation.engine import SimulatedEngine
from tok_core.simulation.manager import LengthSampler, Simulation

__all__ = [
    "LengthSampler",
    "SimulatedEngine",
    "Simulation",
]
