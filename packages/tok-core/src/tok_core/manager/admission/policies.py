"""Make the admission policy that the configuration names."""

from __future__ import annotations

from typing import assert_never

from tok_core.config import AdmissionName
from tok_core.manager.admission.forecast_admission import ForecastAdmission
from tok_core.manager.admission.length_model import LengthModel
from tok_core.manager.admission.policy import AdmissionPolicy
from tok_core.manager.admission.watermark_admission import WatermarkAdmission
from tok_core.manager.kv_cache import Paging, RetainedPrompts
from tok_core.manager.sequences import SequenceTable


def make_admission(
    name: AdmissionName, table: SequenceTable, paging: Paging, lengths: LengthModel, retained_prompts: RetainedPrompts
) -> AdmissionPolicy:
    """Return the policy `name` (`EngineConfig.admission`)."""
    match name:
        case "forecast":
            return ForecastAdmission(table, paging, lengths, retained_prompts)
        case "watermark":
            return WatermarkAdmission(table, paging, retained_prompts)
        case _:
            assert_never(name)
