"""Define `Choice`, the kernels chosen for the attention phases with all measurements, and its JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import cast

from tok_kernels.attention.interface import PHASES, Phase
from tok_kernels.launch_config import AttentionLaunch, LaunchKey
from tok_kernels.measure.timing import Timing


@dataclass(frozen=True, slots=True)
class Measurement:
    """Times of a candidate on a step, and its cost per layer in ms (`Timing.per_layer`)."""

    phase: Phase
    candidate: str
    step: str
    timing: Timing
    cost_ms: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The result of a calibration.

    fastest   name of the candidate chosen for each phase
    measured  all measurements
    rejected  errors of candidates that failed, by phase and name, such as "prefill flashinfer fa3"
    launches  launch configurations found for Triton's kernels, which override the built-in table
    """

    fastest: Mapping[Phase, str]
    measured: tuple[Measurement, ...]
    rejected: Mapping[str, str]
    launches: Mapping[LaunchKey, AttentionLaunch]

    def as_json(self) -> dict[str, object]:
        """Return the choice as JSON values, which `from_json` reads."""
        return {
            "fastest": dict(self.fastest),
            "measured": [asdict(one) for one in self.measured],
            "rejected": dict(self.rejected),
            "launches": [[*kernel, asdict(launch)] for kernel, launch in self.launches.items()],
        }

    @classmethod
    def from_json(cls, values: object) -> Choice:
        """Parse the result of `as_json`. Raises KeyError, TypeError or ValueError for other values."""
        fields = _mapping(values)
        fastest = {_phase(phase): _text(name) for phase, name in _mapping(fields["fastest"]).items()}
        if fastest.keys() != set(PHASES):
            raise ValueError(f"fastest has {sorted(fastest)}; allowed: {', '.join(PHASES)}")
        return cls(
            fastest=fastest,
            measured=tuple(_measurement(_mapping(one)) for one in _list(fields["measured"])),
            rejected={_text(name): _text(why) for name, why in _mapping(fields["rejected"]).items()},
            launches=dict(_launch(_list(one)) for one in _list(fields["launches"])),
        )


def _measurement(values: Mapping[str, object]) -> Measurement:
    timing = {name: _number(value) for name, value in _mapping(values["timing"]).items()}
    return Measurement(
        phase=_phase(values["phase"]),
        candidate=_text(values["candidate"]),
        step=_text(values["step"]),
        timing=Timing(**timing),
        cost_ms=_number(values["cost_ms"]),
    )


def _launch(values: list[object]) -> tuple[LaunchKey, AttentionLaunch]:
    name, head, size, launch = values
    if name not in ("decode", "split", "tile"):
        raise ValueError(f"a kernel is {name!r}; allowed: decode, split, tile")
    numbers = {key: _count(value) for key, value in _mapping(launch).items() if value is not None}
    return LaunchKey(name, _count(head), _count(size)), AttentionLaunch(**numbers)


def _mapping(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is not a mapping")
    return cast("Mapping[str, object]", value)


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is not a list")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _number(value: object) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"{value!r} is not a number")
    return float(cast("float", value))


def _count(value: object) -> int:
    if type(value) is not int or value < 1:
        raise TypeError(f"{value!r} is not a positive integer")
    return value


def _phase(value: object) -> Phase:
    if value not in PHASES:
        raise ValueError(f"a phase is {value!r}; allowed: {', '.join(PHASES)}")
    return value
