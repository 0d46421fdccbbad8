"""Run the manager's loop: take in requests and step outputs, send steps to the worker and reports to the engine."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, assert_never

import msgspec

from tok_core.config import EngineConfig
from tok_core.grammar import LocalWorkers, loader
from tok_core.manager.admission import LengthModel
from tok_core.manager.faults import Faults, Watchdog
from tok_core.manager.grammar import GrammarManager, GrammarWorkers
from tok_core.manager.kv_cache import Paging
from tok_core.manager.output_processor import NOTHING, OutputProcessor, Reported, merge_reports
from tok_core.manager.requests import Request
from tok_core.manager.scheduling import RunAhead, Scheduler
from tok_core.manager.sequences import SequenceTable
from tok_core.manager.stops import StopSets
from tok_core.messages import (
    Cancel,
    EngineInfo,
    Progress,
    Stats,
    StepInput,
    StepOutput,
    Submit,
    ToManager,
)
from tok_core.runtime import HEARTBEAT, TURN

if TYPE_CHECKING:
    from tok_core.text import Tokenizer


class Ports(Protocol):
    """The manager's connections to engine and worker: sockets between processes, queues within one process."""

    def requests(self) -> list[ToManager]:
        """Return the requests and cancellations that have arrived, without waiting."""
        ...

    def outputs(self) -> list[StepOutput]:
        """Return the outputs of steps that have come back, without waiting."""
        ...

    def send(self, step: StepInput) -> None:
        """Queue a step at the worker."""
        ...

    def report(self, progress: Progress) -> None:
        """Send a report to the engine."""
        ...

    def wait(self, seconds: float) -> None:
        """Return when something has arrived, after `seconds` at the latest."""
        ...


class Manager:
    """Scheduling loop that runs ahead of the worker: up to `RunAhead.steps` steps are in flight at a time."""

    def __init__(
        self,
        config: EngineConfig,
        info: EngineInfo,
        ports: Ports,
        pieces: Sequence[bytes] | None,
        clock: Callable[[], float] = time.monotonic,
        tokenizer: Tokenizer | None = None,
        workers: GrammarWorkers | None = None,
    ) -> None:
        self._watchdog = Watchdog(config.step_timeout, clock)
        self._clock = clock
        self.config = config
        self.info = info
        self.ports = ports
        self.requests: dict[int, Request] = {}
        self.table = SequenceTable(info.max_running, info.max_model_len, info.page_size)
        self.paging = Paging(self.table, info.num_pages)
        self.lengths = LengthModel()
        hidden = () if tokenizer is None else tokenizer.special_ids
        self.stops = StopSets(info.vocab_size, info.eos_token_ids, pieces, hidden)
        load = loader(config.model, info.vocab_size, info.eos_token_ids, tokenizer)
        self.grammars = GrammarManager(self.table, workers or LocalWorkers(load), info.vocab_size, clock)
        self.faults = Faults()
        parts = info, self.table, self.paging, self.lengths, self.stops, self.grammars, self.faults
        self.scheduler = Scheduler(
            *parts, groups=config.prefix_groups, admission=config.admission, stages=config.pp, clock=clock
        )
        self.starter = self.scheduler.starter
        self.reclaimer = self.scheduler.reclaimer
        self.output_processor = OutputProcessor(
            self.table, self.reclaimer, self.stops, self.lengths, self.grammars, self.faults
        )
        self.run_ahead = RunAhead(config.run_ahead, config.pp)
        self._cancelled: set[int] = set()  # cancelled requests whose samples may still be in the queue
        self._broken_before = False
        self._arrivals = 0
        self._prompt_tokens = 0
        self._seconds = dict.fromkeys(SECONDS, 0.0)
        self._stats = Stats()  # as reported last
        self._reported_at = -math.inf  # time of the last report

    def run(self) -> None:
        """Run until the process ends or a port raises."""
        while True:
            HEARTBEAT.turned()
            if not self.turn():
                soon = self._reports_soon()
                if not soon:
                    self._report_if_changed()
                self.ports.wait(min(self.grammars.patience, PATIENCE if soon else TURN))

    def close(self) -> None:
        """Stop the grammar workers, after the loop has ended."""
        self.grammars.close()

    def turn(self) -> bool:
        """Take in what has arrived and send at most one step; return whether anything arrived or was sent."""
        messages, outputs = self.ports.requests(), self.ports.outputs()
        for message in messages:
            self._take(message)
        for output in outputs:
            self._take_output(output)
        advanced = [] if outputs else self.output_processor.skip()
        if advanced:
            self._report(advanced)
        for request in self.grammars.admitted():
            try:
                self.scheduler.submit(request)
            except Exception as error:
                self.faults.add(request.rid, error)
        if self.grammars.failed or self.grammars.refused:
            self._report_failed()
        self._drop_cancelled()
        step = self._send_step()
        if self.faults:
            self._cancel_faulty()
            self._report_failed()
        self._watchdog.look(owing=bool(self.output_processor.in_flight and not outputs))
        return bool(messages or outputs or step is not None)

    def _take_output(self, output: StepOutput) -> None:
        began = time.thread_time()
        self.scheduler.step_returned(output.step)
        rounds = [self.output_processor.take(output), *self.output_processor.skip()]
        self._cancel_faulty()
        if broken := self.output_processor.take_broken():
            self._fail_broken(broken)
        self._report(rounds)
        self.run_ahead.observe(output.device_seconds)
        self._seconds["launch_seconds"] += self._sane(output.launch_seconds)
        self._seconds["device_seconds"] += self._sane(output.device_seconds)
        self._seconds["output_seconds"] += time.thread_time() - began

    def _sane(self, seconds: float) -> float:
        """Return the seconds that a step took, or 0 if a clock has jumped: they are negative or above the timeout."""
        return seconds if 0 <= seconds <= self.config.step_timeout else 0.0

    def _send_step(self) -> StepInput | None:
        if len(self.output_processor.in_flight) >= self.run_ahead.steps:
            self.reclaimer.settle()
            return None
        began = time.thread_time()
        step = self.scheduler.next_step(depth=self.run_ahead.depth)
        if step is not None:
            self.output_processor.expect(step)
            self.ports.send(step)
            self._seconds["schedule_seconds"] += time.thread_time() - began
        return step

    def _take(self, message: ToManager) -> None:
        match message:
            case Submit():
                try:
                    self._submit(message)
                except Exception as error:
                    self.faults.add(message.rid, error)
            case Cancel():
                self._cancel(message.rid)
            case _:
                assert_never(message)

    def _rotation(self, prompt_len: int) -> bytes:
        """Return a salt that keeps prompts from cached keys of another rotation; see `EngineInfo.short_prompt`."""
        short = self.info.short_prompt
        if short is None or prompt_len <= short:
            return b""
        return (prompt_len if self.info.rope_depends_on_length else 0).to_bytes(4)

    def _submit(self, message: Submit) -> None:
        self._arrivals += 1
        request = Request(
            message.rid,
            message.prompt,
            message.params,
            self._arrivals,
            self.info.max_model_len,
            message.first_sample,
            message.pooling,
            message.tenant,
            message.salt + self._rotation(len(message.prompt)),
        )
        self.requests[message.rid] = request
        self._prompt_tokens += len(message.prompt)
        if self.grammars.admit(request):
            self.scheduler.submit(request)

    def _cancel(self, rid: int) -> None:
        """Free everything that the request holds, whatever state its samples are in."""
        request = self.requests.pop(rid, None)
        if request is None:
            return
        self.reclaimer.cancel(request)
        self.grammars.leave(request)
        self._cancelled.add(rid)
        if request.left and request.stop_set is not None:  # otherwise its last sample has released it
            self.stops.release(request.stop_set)

    def _drop_cancelled(self) -> None:
        if self._cancelled:
            self.scheduler.withdraw(self._cancelled)
            self._cancelled = set()

    def _report(self, rounds: list[Reported]) -> None:
        reported = merge_reports(rounds)
        for rid in {end.rid for end in reported.finished}:
            if rid in self.requests and self.requests[rid].left == 0:
                self.grammars.leave(self.requests.pop(rid))
        self._stats = self.stats()
        self._send_report(reported, [len(one.rid) for one in rounds] if len(rounds) > 1 else [])

    def _send_report(self, reported: Reported, rounds: list[int]) -> None:
        cached = self.starter.take_newly_cached()
        failed, self.grammars.failed = self.grammars.failed, []
        refused, self.grammars.refused = self.grammars.refused, []
        for rid, _ in (*failed, *refused):
            self._cancel(rid)
        self._drop_cancelled()
        self._reported_at = self._clock()
        # Several samples of a request may have failed; the first reason counts.
        failed = list(dict(reversed(failed)).items())
        self.ports.report(Progress(*reported, cached, self._stats, failed, rounds, refused))

    def _reports_soon(self) -> bool:
        """Return whether statistics can wait for the next report of tokens, which saves a report of their own.

        True for `PATIENCE` seconds after the last report, while steps are in flight.
        """
        return bool(self.output_processor.in_flight) and 0 <= self._clock() - self._reported_at < PATIENCE

    def _fail_broken(self, rids: list[int]) -> None:
        """Fail the requests whose logits were not finite; log this the first time only."""
        reason = (
            "the model's logits are not finite: its weights hold NaN or infinity, or its numbers leave the range of "
            f"{self.info.dtype}"
        )
        if not self._broken_before:
            log.error("a request failed: %s; further failures of this kind are not logged", reason)
        self._broken_before = True
        for rid in rids:
            self._cancel(rid)
            self.grammars.failed.append((rid, reason))

    def _report_failed(self) -> None:
        self._stats = self.stats()
        self._send_report(NOTHING, [])

    def _cancel_faulty(self) -> None:
        """Cancel the requests collected in `faults`; the next report fails these and no others."""
        failed = self.faults.take()
        for rid, _ in failed:
            self._cancel(rid)
        self.grammars.failed += failed

    def _report_if_changed(self) -> None:
        """Report the statistics if a counter or gauge has changed; changed times alone do not count."""
        stats = self.stats()
        if stats != msgspec.structs.replace(self._stats, **self._seconds):
            self._stats = stats
            self._send_report(NOTHING, [])

    def stats(self) -> Stats:
        """Return the counters since the start, and the gauges."""
        requests_running = self.table.requests_running
        return Stats(
            requests_running=requests_running,
            requests_waiting=len(self.requests) - requests_running,
            sequences_running=self.table.sequences_running,
            requests_finished=self.output_processor.requests_finished,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self.starter.cached_tokens,
            computed_tokens=self.scheduler.computed_tokens,
            output_tokens=self.output_processor.output_tokens,
            skipped_tokens=self.output_processor.skipped_tokens,
            discarded_tokens=self.output_processor.discarded_tokens,
            preemptions=self.reclaimer.preemptions,
            pages_total=self.info.num_pages,
            pages_used=self.paging.used,
            pages_cached=self.paging.cached,
            steps=self.scheduler.steps,
            steps_in_flight=len(self.output_processor.in_flight),
            group_rows=self.scheduler.group_rows,
            **self._seconds,
        )


log = logging.getLogger(__name__)

PATIENCE = 0.02  # seconds for which statistics wait for a report of tokens to go with

SECONDS = ("schedule_seconds", "launch_seconds", "device_seconds", "output_seconds")
