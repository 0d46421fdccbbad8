"""Check and load other weights into the model of a running worker, in place, so that CUDA graphs stay valid."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tok_core.errors import ModelError
from tok_core.messages import WeightsResult, WeightsTask
from tok_core.models import CausalLM, check, load
from tok_core.runtime import HEARTBEAT
from tok_core.worker.cuda_graphs import DecodeGraphs

FillModel = Callable[[CausalLM], None]
"""Fills a model with the weights that it had at the start."""


def change_weights(task: WeightsTask, model: CausalLM, graphs: DecodeGraphs, start_weights: FillModel) -> WeightsResult:
    """Execute the task. All workers of the replica call this, while no step is in flight.

    Weights that cannot be loaded are the result's error when they are checked. When they are written, an error is
    raised, and the model's weights are undefined.
    """
    if not task.write:
        try:
            if task.weights is not None:
                check(model, Path(task.weights))
        except ModelError as error:
            return WeightsResult(str(error))
        return WeightsResult()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    if task.weights is None:
        start_weights(model)
    else:
        load(model, Path(task.weights))
    if [parameter.data_ptr() for parameter in model.parameters()] != before:  # a projection left float16's range
        with HEARTBEAT.coarse():
            graphs.capture_again()
    device = model.cos_sin_LD.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return WeightsResult()
