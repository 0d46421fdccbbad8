"""Check and load other weights into the model of a running worker, in place, so that CUDA graphs stay valid."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tok_core.errors import ModelError
from tok_core.messages import (
    ApplyStaged,
    CheckStaged,
    DropStaged,
    JoinGroup,
    LeaveGroup,
    ReceiveTensors,
    TaskResult,
    TransferTask,
    WeightsTask,
)
from tok_core.models import CausalLM, check_checkpoint, load_checkpoint
from tok_core.runtime import HEARTBEAT
from tok_core.worker.cuda_graphs import DecodeGraphs
from tok_core.worker.transfer import WeightReceiver

FillModel = Callable[[CausalLM], None]
"""Fills a model with the weights that it had at the start."""


def change_weights(
    task: WeightsTask | TransferTask,
    model: CausalLM,
    graphs: DecodeGraphs,
    start_weights: FillModel,
    receiver: WeightReceiver,
) -> TaskResult:
    """Execute the task. All workers of the replica call this, while no step is in flight.

    If checking or receiving weights fails, the result has the error. If writing them fails, an exception is raised, and
    the model's weights are undefined.
    """
    match task:
        case WeightsTask(write=True):
            _write(lambda: _load(task, model, start_weights), model, graphs)
        case ApplyStaged():
            _write(receiver.apply, model, graphs)
        case _:
            try:
                _prepare(task, model, receiver)
            except ModelError as error:
                return TaskResult(str(error))
    return TaskResult()


def _prepare(task: WeightsTask | TransferTask, model: CausalLM, receiver: WeightReceiver) -> None:
    """Execute a task that writes no weights."""
    match task:
        case WeightsTask():
            if task.weights is not None:
                check_checkpoint(model, Path(task.weights))
        case JoinGroup():
            receiver.join(task)
        case LeaveGroup():
            receiver.leave(task.name)
        case ReceiveTensors():
            receiver.receive(task)
        case CheckStaged():
            receiver.check(complete=task.complete)
        case DropStaged():
            receiver.drop()


def _load(task: WeightsTask, model: CausalLM, start_weights: FillModel) -> None:
    if task.weights is None:
        start_weights(model)
    else:
        load_checkpoint(model, Path(task.weights))


def _write(write: Callable[[], None], model: CausalLM, graphs: DecodeGraphs) -> None:
    """Call `write`, and capture the CUDA graphs again if parameters have moved."""
    before = [parameter.data_ptr() for parameter in model.parameters()]
    write()
    if [parameter.data_ptr() for parameter in model.parameters()] != before:  # `recast_overflowing_qkv` moved some
        with HEARTBEAT.coarse():
            graphs.capture_again()
    device = model.cos_sin_LD.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
