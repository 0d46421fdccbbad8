"""Read a model's default sampling parameters (temperature, filters, penalty) from generation_config.json."""

from __future__ import annotations

from pathlib import Path

from tok_core.errors import InvalidField
from tok_core.model_files.fields import Fields
from tok_core.sampling_params import SamplingParams

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(path: Path) -> dict[str, int | float]:
    """Return the fields of SamplingParams that generation_config.json in directory `path` sets.

    Raises ModelError, which names the file and the value, for a value that is not allowed. `do_sample` is ignored, as
    in other servers: a temperature has an effect only when sampling.
    """
    file = path / "generation_config.json"
    if not file.is_file():
        return {}
    fields = Fields.of_file(file)
    found = {name: fields.values[name] for name in NAMES if name in fields}
    try:
        checked = SamplingParams(**found)  # type: ignore[arg-type]
    except InvalidField as error:
        allowed = f"{error.allowed}; --generation-config none leaves the file out"
        raise fields.wrong(error.field, error.value, allowed) from None
    return {name: getattr(checked, name) for name in found}
