"""Decide which waiting samples start: queue, fair shares, length model, forecast of page use."""

from __future__ import annotations

from tok_core.manager.admission.fair_shares import FairShares, StartTurn
from tok_core.manager.admission.length_model import LengthModel
from tok_core.manager.admission.policies import AdmissionPolicy, make_admission
from tok_core.manager.admission.sequence_starter import SequenceStarter

__all__ = [
    "AdmissionPolicy",
    "FairShares",
    "LengthModel",
    "SequenceStarter",
    "StartTurn",
    "make_admission",
]
