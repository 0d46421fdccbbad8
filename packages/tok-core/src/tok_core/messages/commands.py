"""Messages that change a running replica: commands of the engine to its manager, and weights to load to its workers."""

from __future__ import annotations

from typing import Literal

import msgspec

CommandAction = Literal["pause", "resume", "clear_cache", "check_weights", "load_weights"]


class EngineCommand(msgspec.Struct, tag=True, frozen=True):
    """A command, executed after all messages before it; the manager answers with a `CommandResult` of its number.

    pause          launch no further step; the answer follows once no step is in flight
    resume         launch steps again
    clear_cache    let no request that starts from now on share pages that are cached now
    check_weights  answer with why `weights` cannot be loaded; nothing changes
    load_weights   load `weights` into the parameters, and clear the cache. A failure ends the replica

    weights  directory of a checkpoint; None: the weights of the replica's start
    """

    number: int
    action: CommandAction
    weights: str | None = None


class CommandResult(msgspec.Struct, tag=True, frozen=True):
    """A command was executed. `error` says why not; "": it was."""

    number: int
    error: str = ""


class WeightsTask(msgspec.Struct, tag=True, frozen=True):
    """Check, or load in place, the weights in a directory (None: those of the start). Sent while no step is in flight.

    write  load them; an error ends the worker
    """

    weights: str | None
    write: bool


class WeightsResult(msgspec.Struct, tag=True, frozen=True):
    """One worker is done with a WeightsTask. `error`: why the weights cannot be loaded; "": they can, or are."""

    error: str = ""
