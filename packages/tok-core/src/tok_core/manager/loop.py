"""Run the manager's loop: take in requests and step outputs, send steps to the worker and reports to the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol

from tok_core.config import EngineConfig
from tok_core.grammar import LocalWorkers, loader
from tok_core.manager.admission import LengthModel
from tok_core.manager.commands import REBALANCE, CommandExecutor, CommandPorts
from tok_core.manager.faults import Faults, Watchdog
from tok_core.manager.grammar_manager import GrammarManager
from tok_core.manager.grammar_workers import GrammarWorkers
from tok_core.manager.intake import RequestIntake
from tok_core.manager.kv_cache import Paging
from tok_core.manager.output_processor import OutputProcessor, Reported
from tok_core.manager.reports import PATIENCE, Reporter
from tok_core.manager.scheduling import RunAhead, Scheduler
from tok_core.manager.sequences import SequenceTable
from tok_core.manager.speculation import DeviceSpeculator, HostSpeculator, Speculation
from tok_core.manager.stops import StopSets
from tok_core.messages import EngineCommand, EngineInfo, Progress, Stats, StepInput, StepOutput, ToManager
from tok_core.runtime import HEARTBEAT, MAX_TURN_SECONDS

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
        command_ports: CommandPorts | None = None,
    ) -> None:
        self._clock = clock
        self._watchdog = Watchdog(config.step_timeout, clock)
        self.ports = ports
        self.faults = Faults()
        self.table = SequenceTable(info.max_running, info.max_model_len, info.page_size, info.draft_slots)
        self.paging = Paging(self.table, info.num_pages)
        self.lengths = LengthModel()
        hidden = () if tokenizer is None else tokenizer.special_ids
        self.stops = StopSets(info.vocab_size, info.eos_token_ids, pieces, hidden)
        words = config.tokenizer or config.model
        workers = workers or LocalWorkers(loader(words, info.vocab_size, info.eos_token_ids, tokenizer))
        self.grammars = GrammarManager(self.table, workers, info.vocab_size, self.faults, clock)
        self.speculator: Speculation | None = None
        if config.speculate != "off" and info.drafts_on_device:
            self.speculator = DeviceSpeculator(self.paging, config.speculate)
        elif config.speculate != "off":
            self.speculator = HostSpeculator(self.paging, config.speculate, info, stages=config.pp)
        self.grammars.draft = None if self.speculator is None else self.speculator.draft_guided
        self.scheduler = Scheduler(
            *(info, self.paging, self.lengths, self.stops, self.grammars, self.faults),
            groups=config.prefix_groups,
            admission=config.admission,
            stages=config.pp,
            speculator=self.speculator,
            clock=clock,
        )
        self.reclaimer = self.scheduler.reclaimer
        self.output_processor = OutputProcessor(
            *(self.table, self.reclaimer, self.stops, self.lengths, self.grammars, self.faults, info.dtype),
            self.speculator,
        )
        self.run_ahead = RunAhead(config.run_ahead, config.pp)
        self.intake = RequestIntake(info, self.scheduler, self.stops, self.grammars, self.faults)
        self.commands = CommandExecutor(self.scheduler, self.output_processor, self.intake, command_ports)
        self._rebalance_steps = config.expert_rebalance_steps if config.redundant_experts else 0
        self._rebalanced_at = 0  # step
        self.reporter = Reporter(self.scheduler, self.output_processor, self.intake, config.step_timeout, clock)

    def run(self) -> NoReturn:
        """Run until the process ends or a port raises."""
        while True:
            HEARTBEAT.turned()
            if not self.turn():
                soon = self.reporter.builds_soon()
                if not soon:
                    self._report_if_changed()
                self.ports.wait(min(self.grammars.patience, PATIENCE if soon else MAX_TURN_SECONDS))

    def close(self) -> None:
        """Stop the grammar workers, after the loop has ended."""
        self.grammars.close()

    def turn(self) -> bool:
        """Take in what has arrived and send at most one step; return whether the next turn may send another."""
        messages, outputs = self.ports.requests(), self.ports.outputs()
        for message in messages:
            if isinstance(message, EngineCommand):
                self.commands.take(message)
            else:
                self.intake.take(message)
        for output in outputs:
            self._take_output(output)
        advanced = [] if outputs else self.output_processor.jump_forward()
        if self.speculator is not None and (outputs or advanced):
            upcoming, in_flight = self.scheduler.microbatches.upcoming(), self.output_processor.in_flight
            self.speculator.learn(upcoming, len(in_flight))
            self.run_ahead.few, self.run_ahead.drafts = self.speculator.active, self.speculator.drafts_ahead
        self.intake.submit_compiled()
        if advanced or self.faults:
            self._report(advanced)
        self.intake.drop_cancelled()
        self._rebalance_if_due()
        step = self._send_step()
        if self.speculator is not None and (outputs or advanced):
            self.speculator.add_to_index()
        held = self.commands.holds
        if held:
            self.commands.advance()
        if self.faults:
            self._report([])
        self._watchdog.look(owing=bool(self.output_processor.in_flight and not outputs))
        return bool(messages or outputs or step is not None or (held and not self.commands.holds))

    def _take_output(self, output: StepOutput) -> None:
        began = time.thread_time()
        self.scheduler.step_returned(output.step)
        processor = self.output_processor
        self._report([processor.take(output), *processor.accept_drafts(), *processor.jump_forward()])
        self.run_ahead.observe(output.device_seconds)
        if self.speculator is not None:
            self.speculator.observe(output, self._clock())
        self.reporter.add_output(output, time.thread_time() - began)

    def _rebalance_if_due(self) -> None:
        """Let workers place experts anew every `expert_rebalance_steps` steps, once no step is in flight."""
        steps = self.scheduler.steps
        if self._rebalance_steps and not self.commands.holds and steps - self._rebalanced_at >= self._rebalance_steps:
            self._rebalanced_at = steps
            self.commands.take(REBALANCE)

    def _send_step(self) -> StepInput | None:
        self.run_ahead.waits = self.speculator is not None and self.speculator.waits
        if self.commands.holds or len(self.output_processor.in_flight) >= self.run_ahead.steps:
            self.reclaimer.settle()
            return None
        began = time.thread_time()
        step = self.scheduler.next_step(depth=self.run_ahead.depth)
        if step is not None:
            if self.speculator is not None:
                self.speculator.sent(step)
            self.output_processor.expect(step)
            self.ports.send(step)
            self.reporter.add_scheduling(time.thread_time() - began)
        return step

    def _report(self, reports: list[Reported]) -> None:
        self.ports.report(self.reporter.build(reports))

    def _report_if_changed(self) -> None:
        if self.reporter.stats_changed():
            self._report([])

    def stats(self) -> Stats:
        """Return the counters since the start, and the gauges."""
        return self.reporter.stats()
