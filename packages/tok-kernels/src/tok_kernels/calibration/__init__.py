"""Choose the fastest kernel for each attention phase of a shape; results are measured once and stored on disk."""

from __future__ import annotations

from tok_kernels.calibration.calibrate import calibrate, stored_choice
from tok_kernels.calibration.candidates import Candidate, list_candidates
from tok_kernels.calibration.choice import Choice, Measurement
from tok_kernels.calibration.store import cache_directory

__all__ = ["Candidate", "Choice", "Measurement", "cache_directory", "calibrate", "list_candidates", "stored_choice"]
