"""Choose the fastest kernel for each attention phase of a shape: measure once per machine, then read from disk."""

from __future__ import annotations

from tok_kernels.calibration.calibrate import calibrate, known
from tok_kernels.calibration.candidates import Candidate, candidates
from tok_kernels.calibration.choice import Choice, Measurement
from tok_kernels.calibration.store import cache_directory

__all__ = ["Candidate", "Choice", "Measurement", "cache_directory", "calibrate", "candidates", "known"]
