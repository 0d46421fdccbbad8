"""Record the steps of a manager over one worker, and replay them by the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tok_core import EngineConfig, SamplingParams
from tok_core.config import RankCoordinates, Speculate
from tok_core.manager.loop import Manager
from tok_core.messages import EngineInfo, Progress, StepInput, StepOutput, Submit, ToEngine
from tok_core.model_config.model_config import read_config
from tok_core.models.registry import build
from tok_core.models.weights.loading import load_checkpoint
from tok_core.parallel.pipeline import Pipeline
from tok_core.parallel.process_groups import ProcessGroups
from tok_core.replicas.local_ports import LocalPorts
from tok_core.worker.runner import Runner
from tok_core.worker.state import WorkerState
from tok_kernels import choose

CPU = torch.device("cpu")
PAGE_SIZE, PAGES, SLOTS, LENGTH, STEP_TOKENS = 8, 96, 12, 96, 40

_KEPT: list[Runner] = []  # keeps send buffers alive: gloo drops unsent data of a freed buffer


def stage_runner(path: Path, peers: ProcessGroups) -> Runner:
    """Return the worker of a stage, in fp32 on the reference backend."""
    config, backend, coordinates = read_config(path), choose(CPU), peers.coordinates
    model = build(config, backend, CPU, torch.float32, coordinates)
    load_checkpoint(model, path)
    state = WorkerState(
        model.local,
        *(CPU, torch.float32),
        slots=SLOTS,
        num_pages=PAGES,
        page_size=PAGE_SIZE,
        pages_per_slot=-(-LENGTH // PAGE_SIZE),
    )
    return Runner(model, backend, state, None, Pipeline(peers, STEP_TOKENS, config.hidden_size, torch.float32, SLOTS))


class RecordingPorts(LocalPorts):
    """Ports that record steps, outputs and reports."""

    def __init__(self, runner: Runner, run_ahead: int) -> None:
        super().__init__(runner, run_ahead, self._keep)
        self.steps: list[StepInput] = []
        self.taken: list[StepOutput] = []
        self.reports: list[Progress] = []

    def send(self, step: StepInput) -> None:
        self.steps.append(step)
        super().send(step)

    def outputs(self) -> list[StepOutput]:
        outputs = super().outputs()
        self.taken += outputs
        return outputs

    def _keep(self, progress: ToEngine) -> None:
        assert isinstance(progress, Progress)
        self.reports.append(progress)


def record(
    path: Path,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    pp: int,
    run_ahead: int,
    speculate: Speculate = "off",
) -> RecordingPorts:
    """Record what a manager for `pp` stages sends and what one worker with the whole model returns."""
    model = read_config(path)
    ports = RecordingPorts(stage_runner(path, ProcessGroups(RankCoordinates(), CPU)), run_ahead)
    draft_slots = 0 if speculate == "off" else SLOTS // 2
    info = EngineInfo(
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        max_model_len=LENGTH,
        num_pages=PAGES,
        page_size=PAGE_SIZE,
        max_running=SLOTS - draft_slots,
        draft_slots=draft_slots,
        max_step_tokens=STEP_TOKENS,
        device="cpu",
        dtype="float32",
        backend="reference",
    )
    config = EngineConfig(model=str(path), pp=pp, run_ahead=run_ahead, speculate=speculate)
    manager = Manager(config, info, ports, None)
    manager.scheduler.microbatches.fewest = 1
    for rid, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        ports.submit(Submit(rid, np.array(prompt, np.int32), one))
    worked = True
    while worked or manager.output_processor.in_flight:
        if not worked:
            ports.wait(0)
        worked = manager.turn()
    return ports


def carry_out(peers: ProcessGroups, path: Path, steps: Sequence[StepInput], in_flight: int) -> list[StepOutput]:
    """Return the outputs of this stage's worker, which keeps up to `in_flight` steps in flight."""
    runner, launched, outputs = stage_runner(path, peers), [], []
    _KEPT.append(runner)
    for step in steps:
        launched.append(runner.launch(step))
        if len(launched) == in_flight:
            outputs.append(launched.pop(0).output())
    return outputs + [one.output() for one in launched]
