"""Name the trace file of each worker of the first replica. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from tok_core.config import EngineConfig, RankCoordinates, all_coordinates


def trace_file(file: Path, coordinates: RankCoordinates) -> Path:
    """Return `file` for the worker that returns tokens, else a file beside it named for the worker's coordinates.

    >>> [str(trace_file(Path("a/steps.json"), coordinates)) for coordinates in all_coordinates(1, 2)]
    ['a/steps.json', 'a/steps.stage0.rank1.json']
    """
    if coordinates.returns:
        return file
    return file.with_name(f"{file.stem}.stage{coordinates.stage}.rank{coordinates.rank}{file.suffix}")


def trace_files(config: EngineConfig) -> dict[RankCoordinates, Path]:
    """Return the trace file of each worker, in order of their numbers; empty if `config` asks for no trace."""
    if config.trace is None:
        return {}
    return {
        coordinates: trace_file(Path(config.trace), coordinates)
        for coordinates in all_coordinates(config.pp, config.tp, ep=config.ep)
    }
