"""How a model's makers would have it sampled: what generation_config.json says of temperature, filters and penalty."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tok_core.errors import InvalidField
from tok_core.model.fields import Fields
from tok_core.sampling import SamplingParams

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_USUAL = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}


def sampling_defaults(path: Path) -> dict[str, float]:
    """Fields of SamplingParams that generation_config.json in directory `path` sets to other than the usual.

    Raises ModelError that names the file and the value that is not allowed. `do_sample` counts for nothing, as in
    other servers: a temperature is only of use to those who sample.
    """
    file = path / "generation_config.json"
    if not file.is_file():
        return {}
    fields = Fields.of_file(file)
    found = {name: fields.values[name] for name in NAMES if name in fields and fields.values[name] != _USUAL[name]}
    try:
        SamplingParams(**found)  # type: ignore[arg-type]
    except InvalidField as error:
        raise fields.wrong(error.field, error.value, error.allowed) from None
    return found  # type: ignore[return-value]
