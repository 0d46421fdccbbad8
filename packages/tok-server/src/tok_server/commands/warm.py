"""`tok warm`: start a model once, and keep its compiled kernels and calibration in a directory for later starts."""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path

from tok_core import Engine, EngineConfig, InvalidField
from tok_server.commands.serve import log_to_stderr
from tok_server.flags import engine_config


def main(options: argparse.Namespace) -> int:
    """Start the engine until it is ready, and print where its kernels are. Errors: InvalidField, TokError."""
    try:
        return _warm(engine_config(options))
    except InvalidField as error:
        raise error.renamed("out") if error.field == "cache_dir" else error from None


def _warm(config: EngineConfig) -> int:
    assert config.cache_dir is not None
    log_to_stderr("info", "text")
    logging.getLogger("tok").info("starting %s; its kernels go into %s", config.model, config.cache_dir)
    began = time.monotonic()
    engine = Engine(config)
    engine.close()
    size = sum(file.stat().st_size for file in Path(config.cache_dir).expanduser().rglob("*") if file.is_file())
    print(f"{config.cache_dir}: {size / 2**20:.0f} MiB, after a start of {time.monotonic() - began:.0f} s")
    return 0
