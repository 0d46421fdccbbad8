"""Fill a worker's model with weights: at the start, and later in place, so that CUDA graphs stay valid."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tok_core.config import EngineConfig
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
from tok_core.models import CausalLM, check_checkpoint, fill_dummy_weights, load_checkpoint
from tok_core.runtime import HEARTBEAT
from tok_core.worker.cuda_graphs import DecodeGraphs
from tok_core.worker.transfer import WeightReceiver

FillModel = Callable[[CausalLM], None]
"""Fills a model with the weights that it had at the start: `fill_model` of the worker's settings."""


def fill_model(config: EngineConfig, path: Path, model: CausalLM) -> None:
    """Fill the model with the checkpoint in directory `path`, or with dummy weights, as the configuration says.

    Settings of the dummy weights' token distribution do not apply to a draft head.
    """
    if config.load_format == "dummy" and model.config.eagle3 is not None:
        fill_dummy_weights(model, config.seed)
    elif config.load_format == "dummy":
        fill_dummy_weights(
            model,
            config.seed,
            eos_probability=config.eos_probability,
            eos_temperature=config.eos_temperature,
            moe_skew=config.moe_skew,
            markov_probability=config.markov_probability,
        )
    else:
        load_checkpoint(model, path)


def change_weights(
    task: WeightsTask | TransferTask,
    model: CausalLM,
    graphs: DecodeGraphs,
    start_weights: FillModel,
    receiver: WeightReceiver,
) -> TaskResult:
    """Execute a task that checks, receives or writes weights, while no step is in flight.

    All workers of the replica call this. If checking or receiving weights fails, the result has the error. If writing
    them fails, an exception is raised, and the model's weights are undefined.
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
    """Load the weights in the task's directory, or those of the start if it names none."""
    if task.weights is None:
        start_weights(model)
    else:
        load_checkpoint(model, Path(task.weights))


def _write(write: Callable[[], None], model: CausalLM, graphs: DecodeGraphs) -> None:
    """Call `write`, and capture the CUDA graphs again if parameters have other addresses afterwards."""
    before = [parameter.data_ptr() for parameter in model.parameters()]
    write()
    if [parameter.data_ptr() for parameter in model.parameters()] != before:  # by `recast_overflowing_qkv`
        with HEARTBEAT.coarse():
            graphs.capture_again()
    device = model.cos_sin_LD.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
