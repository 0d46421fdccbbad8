"""Report tokens, ends, failures and statistics to the engine."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import numpy as np

from tok_core.manager.intake import RequestIntake
from tok_core.manager.output_processor import OutputProcessor, Reported, merge_reports
from tok_core.manager.scheduling import Scheduler
from tok_core.messages import Progress, Stats, StepOutput

PATIENCE = 0.02  # seconds for which statistics wait for a report of tokens to go with
SECONDS = ("schedule_seconds", "launch_seconds", "device_seconds", "output_seconds")
EXPERT_TOKENS = ("expert_mean_tokens", "expert_max_tokens", "expert_rank_max_tokens")


class Reporter:
    """Builder of the manager's reports: tokens, ends and failures since the last one, and the statistics."""

    def __init__(
        self,
        scheduler: Scheduler,
        output_processor: OutputProcessor,
        intake: RequestIntake,
        step_timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._output_processor = output_processor
        self._intake = intake
        self._step_timeout = step_timeout
        self._clock = clock
        self._sums = dict.fromkeys((*SECONDS, *EXPERT_TOKENS), 0.0)
        self._stats = Stats()  # as reported last
        self._missing_graphs = 0
        self._reported_at = -math.inf  # time of the last report

    def build(self, reports: list[Reported]) -> Progress:
        """Return these reports of tokens as one; close the requests that have ended, and cancel failed ones."""
        failures = self._intake.cancel_faulty()
        reported = merge_reports(reports)
        self._intake.close({end.rid for end in reported.finished})
        started = self._scheduler.starter.take_newly_started()
        self._stats, self._reported_at = self.stats(), self._clock()
        return Progress(*reported, started, self._stats, failures.failed, failures.refused)

    def stats_changed(self) -> bool:
        """Return whether a counter or gauge has changed since the last report, other than sums of times."""
        return self.stats() != msgspec.structs.replace(self._stats, **self._sums)

    def builds_soon(self) -> bool:
        """Return whether statistics can wait for the next report of tokens, which saves a report of their own.

        True for `PATIENCE` seconds after the last report, while steps are in flight.
        """
        return bool(self._output_processor.in_flight) and 0 <= self._clock() - self._reported_at < PATIENCE

    def add_scheduling(self, seconds: float) -> None:
        """Add the CPU time that the manager took to build a step."""
        self._sums["schedule_seconds"] += seconds

    def add_output(self, output: StepOutput, seconds: float) -> None:
        """Add the times of a step, and the CPU time that the manager took to process its output."""
        self._sums["output_seconds"] += seconds
        for name in ("launch_seconds", "device_seconds"):
            taken: float = getattr(output, name)
            if 0 <= taken <= self._step_timeout:  # otherwise a clock has jumped
                self._sums[name] += taken
        self._missing_graphs = output.missing_graphs
        if output.expert_tokens is not None:
            self._add_expert_tokens(output.expert_tokens, output.slot_expert)

    def _add_expert_tokens(self, tokens_LS: np.ndarray, expert_LS: np.ndarray | None) -> None:
        info = self._scheduler.info
        layers, slots = tokens_LS.shape
        ranks, experts = info.tp if info.ep else 1, slots - info.redundant_experts
        of_ranks_LR = tokens_LS.reshape(layers, ranks, -1).sum(2) * ranks / experts
        tokens_LE = tokens_LS
        if expert_LS is not None:  # add up the tokens of an expert's copies
            tokens_LE = np.zeros((layers, experts), tokens_LS.dtype)
            np.add.at(tokens_LE, (np.arange(layers)[:, None], expert_LS), tokens_LS)
        of_layers_3L = tokens_LS.sum(1) / experts, tokens_LE.max(1), of_ranks_LR.max(1)
        for name, of_layers in zip(EXPERT_TOKENS, of_layers_3L, strict=True):
            self._sums[name] += float(of_layers.sum())

    def stats(self) -> Stats:
        """Return the counters since the start, and the gauges."""
        scheduler, outputs = self._scheduler, self._output_processor
        table, paging, starter = scheduler.table, scheduler.paging, scheduler.starter
        requests_running, speculator = table.requests_running, scheduler.speculator
        drafts = (0, 0, 0, 0, 0) if speculator is None else speculator.counters
        return Stats(
            requests_running=requests_running,
            requests_waiting=len(self._intake.requests) - requests_running,
            sequences_running=table.sequences_running,
            requests_finished=outputs.requests_finished,
            prompt_tokens=self._intake.prompt_tokens,
            cached_tokens=starter.cached_tokens,
            computed_tokens=scheduler.computed_tokens,
            output_tokens=outputs.output_tokens,
            skipped_tokens=outputs.skipped_tokens,
            discarded_tokens=outputs.discarded_tokens,
            draft_steps=drafts[0],
            drafted_tokens=drafts[1],
            accepted_tokens=drafts[2],
            model_drafted_tokens=drafts[3],
            model_accepted_tokens=drafts[4],
            preemptions=scheduler.reclaimer.preemptions,
            pages_total=scheduler.info.num_pages,
            pages_used=paging.used,
            pages_cached=paging.cached,
            steps=scheduler.steps,
            steps_in_flight=len(outputs.in_flight),
            group_rows=scheduler.group_rows,
            missing_graphs=self._missing_graphs,
            **self._sums,
        )
