"""Messages between engine, manager and worker, their encoding (msgpack with arrays as raw bytes), and their sockets.

engine ─Submit, Cancel─► manager ─StepInput─► worker ─StepOutput─► manager ─Progress─► engine
engine ─EngineCommand─► manager ─WeightsTask, TransferTask─► worker ─WeightsResult─► manager ─CommandResult─► engine
"""

from __future__ import annotations

from tok_core.messages.codec import EMPTY, Float32, Int32, Int64, array, decoder, encode
from tok_core.messages.commands import (
    TENSOR_DTYPES,
    ApplyStaged,
    CheckStaged,
    CommandAction,
    CommandResult,
    DropStaged,
    EngineCommand,
    GroupProtocol,
    IpcHandle,
    JoinGroup,
    LeaveGroup,
    ReceiveTensors,
    TransferTask,
    WeightsResult,
    WeightsTask,
)
from tok_core.messages.processes import (
    Beat,
    EngineInfo,
    Failed,
    FromProcess,
    FromWorker,
    ProcessLaunch,
    Rendezvous,
    Silence,
    ToEngine,
    ToWorker,
)
from tok_core.messages.requests import Cancel, Embedded, Finished, Progress, Scores, Stats, Submit, ToManager
from tok_core.messages.sockets import Receiver, Sender
from tok_core.messages.steps import (
    MAX_CASCADE_LEVELS,
    GroupLevel,
    NewSlots,
    PromptValues,
    RequestedPromptOutputs,
    SharedPages,
    StepInput,
    StepOutput,
)

__all__ = [
    "EMPTY",
    "MAX_CASCADE_LEVELS",
    "TENSOR_DTYPES",
    "ApplyStaged",
    "Beat",
    "Cancel",
    "CheckStaged",
    "CommandAction",
    "CommandResult",
    "DropStaged",
    "Embedded",
    "EngineCommand",
    "EngineInfo",
    "Failed",
    "Finished",
    "Float32",
    "FromProcess",
    "FromWorker",
    "GroupLevel",
    "GroupProtocol",
    "Int32",
    "Int64",
    "IpcHandle",
    "JoinGroup",
    "LeaveGroup",
    "NewSlots",
    "ProcessLaunch",
    "Progress",
    "PromptValues",
    "ReceiveTensors",
    "Receiver",
    "Rendezvous",
    "RequestedPromptOutputs",
    "Scores",
    "Sender",
    "SharedPages",
    "Silence",
    "Stats",
    "StepInput",
    "StepOutput",
    "Submit",
    "ToEngine",
    "ToManager",
    "ToWorker",
    "TransferTask",
    "WeightsResult",
    "WeightsTask",
    "array",
    "decoder",
    "encode",
]
