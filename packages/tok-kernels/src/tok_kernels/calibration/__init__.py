"""Choose the fastest kernel per attention phase for a model's shape on this device: measured once, then read from
disk."""

from __future__ import annotations

from tok_kernels.calibration.calibrate import calibrate, known
from tok_kernels.calibration.candidates import Candidate, candidates
from tok_kernels.calibration.choice import Choice, Measurement
from tok_kernels.calibration.store import cache_directory

__all__ = ["Candidate", "Choice", "Measurement", "cache_directory", "calibrate", "candidates", "known"]
