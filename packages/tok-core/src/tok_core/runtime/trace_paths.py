"""Name the trace file of each worker of the first replica. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from tok_core.config import EngineConfig, RankCoordinates


def trace_file(file: Path, coordinates: RankCoordinates) -> Path:
    """Return `file` for the worker that returns tokens, else a file beside it named for the worker's coordinates.

    >>> ranks = EngineConfig(model="m", tp=2).rank_coordinates()
    >>> [str(trace_file(Path("a/steps.json"), coordinates)) for coordinates in ranks]
    ['a/steps.json', 'a/steps.stage0.rank1.json']
    """
    if coordinates.returns:
        return file
    return file.with_name(f"{file.stem}.stage{coordinates.stage}.rank{coordinates.rank}{file.suffix}")


def trace_files(config: EngineConfig) -> dict[RankCoordinates, Path]:
    """Return the trace file of each worker, in order of their numbers; empty if `config` asks for no trace."""
    if config.trace is None:
        return {}
    return {one: trace_file(Path(config.trace), one) for one in config.rank_coordinates()}
