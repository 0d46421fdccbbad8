"""Model the time of a step by its rows, and choose how many drafted tokens a step verifies."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tok_core.messages import Float64, StepInput

RECENT: Final = 16  # latest observations that an estimate uses
FORGET_STEPS: Final = 256  # steps without an observation after which an estimate is unknown again
MIN_OBSERVATIONS: Final = 2  # of an estimate; the first step of a size may take longer
MIN_GAIN: Final = 1.03  # minimum expected speed-up of a step with drafts; less is within the error of estimates
MAX_LOSS: Final = 0.01  # share of the time of plain steps that drafts may cost
MAX_CREDIT_STEPS: Final = 4.0  # plain steps; limit of the time saved earlier that drafts may lose later
MAX_OVERRUN: Final = 2.0  # factor of the expected seconds that limits an observation; the machine may pause
HOST_ROWS: Final = 256.0  # rows that take the host as long as the rest of a step with drafts; fits 5 to 1,071 rows
ASSUMED_ROWS: Final = 256.0  # without measurements: rows that take as long as the rest of a step
ASSUMED_WAIT: Final = 0.25  # without measurements: time lost by waiting, as a share of a step's fixed time


class DraftCandidate(NamedTuple):
    """Drafts that a step may verify: probabilities that tokens are accepted, in falling order.

    passes  passes of the draft model that draft them
    """

    probability: Float64
    passes: int = 0


class StepCosts:
    """Model of a step's seconds by its rows, which gives the number of drafted tokens with the highest speed.

        seconds(rows) = device(rows) + overhead

    device(rows) is the time on the device: measured, for sizes that are half an octave apart, and interpolated. The
    overhead is the rest of the time from the return of one step to the return of the next. It is small for a step that
    was queued while another ran. Before a step with drafts, the manager waits for values, and the device for the host,
    whose time grows with the rows: wait(rows) = w · (1 + rows / HOST_ROWS), with a measured w. In a pipeline,
    device(rows) is the time of the last stage. The time at the other stages counts as overhead, as far as no other step
    returns meanwhile: for a lone sequence, all of it.

    A step of n sequences yields n tokens; a prompt's tokens count as sequences, too. Drafted tokens, accepted with
    probabilities p1 ≥ p2 ≥ …, each add a row:

        speed(k) = (n + p1 + … + pk) / (device(n + k) + wait(n + k))    with k drafted tokens
        speed(0) = n / (device(n) + overhead of a queued step)          without

    The k of the highest speed is chosen. It is 0 unless the speed is MIN_GAIN times speed(0). For example, steps of 4,
    5 and 6 rows take 2.0, 2.1 and 2.2 ms, and 0.2 ms longer after a wait; drafts of two sequences are accepted with
    probabilities 0.9 and 0.3. Then speed(0) = 2.00, speed(1) = 4.9 / 2.3 = 2.13 and speed(2) = 5.2 / 2.4 = 2.17: k = 2.

    A credit in seconds bounds the loss by wrong estimates. Each plain step adds MAX_LOSS of its time. A step with
    drafts adds the time that plain steps would have taken for its tokens, and subtracts its own. No step has drafts
    while the credit is negative, so drafts cost at most the share MAX_LOSS of the time. The first step of a size does
    not count, since it may load kernels and capture a graph. A size is tried only if it has at most twice the rows of
    the largest known size, or of the plain step. A size without a measurement for FORGET_STEPS steps is unknown again,
    and may be tried again.

    Drafts of a draft model take passes of that model before the step. A pass takes a share of device(n). The share is
    measured; until then it is that of the weights that the pass reads. What the draft model reads before its first
    draft of a sequence is not counted: later drafts of the sequence make up for it. What it reads after steps without
    its drafts is subtracted from the credit, so that it does not read again and again for few drafts.

    measured     False: nothing is measured. A step of r rows is assumed to take 1 + r / ASSUMED_ROWS, and ASSUMED_WAIT
                 more if it has drafts
    assumed_wait time lost by waiting for a draft, as a share of a step's fixed time, if nothing is measured
    pass_share   share of the model's weights that a pass of the draft model reads
    stages       pipeline stages
    """

    def __init__(
        self, *, measured: bool, assumed_wait: float = ASSUMED_WAIT, pass_share: float = 0.0, stages: int = 1
    ) -> None:
        self._measured = measured
        self._assumed_wait = assumed_wait
        self._pass_share = pass_share
        self._max_overhead = MAX_OVERRUN + stages - 1  # device times of a step
        self._passes = Recent()  # measured seconds of a pass, as a share of device(n)
        self._sizes: dict[int, Recent] = {}  # device seconds, by half octave of the rows
        self._queued = Recent()  # overhead of steps without drafts
        self._waited = Recent()  # w, of steps with drafts
        self._sent: deque[SentStep] = deque()
        self._step = 0
        self._returned = 0.0
        self._credit = 0.0  # seconds

    def sent(self, step: StepInput, drafted: int, *, waited: bool, read_again: float = 0.0) -> None:
        """Record the rows of a step that was sent.

        drafted     rows that verify drafts
        waited      whether the step was held back for drafts
        read_again  share of the tokens that the draft model reads because steps had none of its drafts
        """
        rows, drafts = len(step.decode_slot) + len(step.prefill_token), step.drafts
        passes, reads = (0, False) if drafts is None else (drafts.lent.shape[1], len(drafts.chunk_slot) > 0)
        self._sent.append(SentStep(rows, rows - drafted, waited, passes, reads, read_again))

    def returned(
        self,
        now: float,
        accepted: int,
        device_seconds: float,
        draft_seconds: float = 0.0,
        capture_seconds: float = 0.0,
    ) -> None:
        """Learn from the oldest step sent, which has returned.

        accepted         drafted tokens of it that were accepted
        draft_seconds    the part of `device_seconds` that the draft model took
        capture_seconds  what the capture of the step's CUDA graph took, which later steps replay: it does not count
        """
        rows, sequences, waited, passes, reads, read_again = self._sent.popleft()
        interval, self._returned = max(now - self._returned - capture_seconds, 0.0), now
        self._step += 1
        if not self._measured:
            return
        size = self._sizes.setdefault(_size(rows), Recent())
        draft_seconds = max(draft_seconds, 0.0)
        seconds, interval = max(device_seconds - draft_seconds, 0.0), max(interval - draft_seconds, 0.0)
        first = size.empty
        if size.known(self._step):
            seconds = min(seconds, MAX_OVERRUN * size.seconds)
        size.add(self._step, seconds, rows)
        if self._step == 1 or (first and rows > sequences):
            return
        device = size.seconds if rows == sequences else float(self._device(np.array([sequences]))[0])
        if passes and not reads:
            share = draft_seconds / passes / max(device, 1e-9)
            self._passes.add(self._step, min(share, MAX_OVERRUN * self._pass(1.0)) if self._passes.seconds else share)
        plain = device + self._queued_overhead
        host = 1 + rows / HOST_ROWS
        wait = self._waited.seconds * host
        gain = MAX_LOSS * plain - read_again * max(draft_seconds - passes * self._pass(device), 0.0)
        if rows > sequences:
            interval = min(interval, MAX_OVERRUN * (seconds + max(wait, plain)))
            self._waited.add(self._step, max(interval - seconds, 0.0) / host)
            passed = passes * self._pass(device)
            passed = passed if reads else min(draft_seconds, MAX_OVERRUN * passed)
            gain += plain * (1 + accepted / sequences) - interval - passed
        elif waited:
            gain -= max(wait - self._queued.seconds, 0.0)
        else:
            self._queued.add(self._step, min(max(interval - seconds, 0.0), self._max_overhead * seconds))
        self._credit = min(self._credit + gain, MAX_CREDIT_STEPS * plain)

    def allows(self, sequences: int) -> bool:
        """Return whether a step may have drafts: its time without them is known, and the credit is not negative."""
        return not self._measured or (self._known(sequences) and self._credit >= 0)

    def choose(self, sequences: int, probability: Float64) -> int:
        """Return how many tokens to draft; `probability` holds their acceptance probabilities in falling order."""
        return self.choose_among(sequences, [DraftCandidate(probability)])[1]

    def choose_among(self, sequences: int, candidates: Sequence[DraftCandidate]) -> tuple[int, int]:
        """Return which of the candidates to draft from, and how many of its tokens; 0 tokens: none of any."""
        if not self.allows(sequences):
            return 0, 0
        largest = max((one.rows for one in self._sizes.values() if one.known(self._step)), default=math.inf)
        longest = max(len(one.probability) for one in candidates)
        drafted = np.arange(int(min(2 * max(sequences, largest) - sequences, longest)) + 1)
        device = self._device(sequences + drafted)
        seconds = device[1:] + self._wait(sequences + drafted[1:])
        best, number, count = sequences / max(device[0] + self._queued_overhead, 1e-9), 0, 0
        for i, (probability, passes) in enumerate(candidates):
            tokens = sequences + np.cumsum(probability[: len(seconds)])
            if not len(tokens):
                continue
            needed = seconds[: len(tokens)] + passes * self._pass(float(device[0]))
            speed = tokens / np.maximum(needed * MIN_GAIN, 1e-9)
            if (fastest := speed.max()) > best:
                best, number, count = fastest, i, int(speed.argmax()) + 1
        return number, count

    def _pass(self, device: float) -> float:
        """Return the seconds of a pass of the draft model, given those of a step without drafts on the device."""
        return device * (self._passes.seconds if self._passes.seconds else self._pass_share)

    def _known(self, rows: int) -> bool:
        size = self._sizes.get(_size(rows))
        return size is not None and size.known(self._step)

    @property
    def _queued_overhead(self) -> float:
        """Return the overhead of a step without drafts in seconds; while it is unknown, that of one with them."""
        known = self._queued if self._queued.known(self._step) or not self._waited.known(self._step) else self._waited
        return known.seconds

    def _wait(self, rows: NDArray[np.int64]) -> Float64:
        """Return the overhead in seconds of a step with drafts; while it is unknown, that of a step without."""
        if not self._measured:
            return np.full(len(rows), self._assumed_wait)
        if self._waited.known(self._step) or not self._queued.known(self._step):
            return self._waited.seconds * (1 + rows / HOST_ROWS)
        return np.full(len(rows), self._queued.seconds)

    def _device(self, rows: NDArray[np.int64]) -> Float64:
        """Return the device seconds of steps by their rows: no more than any larger known size took.

        Beyond the largest known size the time grows as a power of the rows, as between the smallest and the largest.
        """
        known = sorted((one.rows, one.seconds) for one in self._sizes.values() if one.known(self._step))
        if not known:
            return 1 + rows / ASSUMED_ROWS
        row, seconds = np.array(known).T
        seconds = np.minimum.accumulate(np.maximum(seconds, 1e-9)[::-1])[::-1]
        if row[-1] >= 1.4 * row[0]:
            power = min(math.log(seconds[-1] / seconds[0]) / math.log(row[-1] / row[0]), 1.0)
            beyond = np.maximum(rows / row[-1], 1.0) ** power
        else:
            beyond = np.maximum((ASSUMED_ROWS + rows) / (ASSUMED_ROWS + row[-1]), 1.0)
        found: Float64 = np.interp(rows, row, seconds) * beyond
        return found


class SentStep(NamedTuple):
    """Step in flight: its rows, those of them without drafts, and what was done for its drafts."""

    rows: int
    sequences: int
    waited: bool
    passes: int
    reads: bool
    read_again: float


class Recent:
    """Mean of the lower half of the latest observations, since disturbances only lengthen a step.

    The mean is unknown before MIN_OBSERVATIONS, and again FORGET_STEPS after the last observation.
    """

    def __init__(self) -> None:
        self.seconds = self.rows = 0.0
        self._newest = 0
        self._pairs = deque[tuple[float, int]](maxlen=RECENT)

    @property
    def empty(self) -> bool:
        """Return whether nothing was ever observed."""
        return not self._pairs

    def known(self, step: int) -> bool:
        """Return whether there is an estimate in this step."""
        return len(self._pairs) >= MIN_OBSERVATIONS and step - self._newest <= FORGET_STEPS

    def add(self, step: int, seconds: float, rows: int = 0) -> None:
        """Add an observation of this step."""
        if step - self._newest > FORGET_STEPS:
            self._pairs.clear()
        self._newest = step
        self._pairs.append((seconds, rows))
        lower = sorted(self._pairs)[: (len(self._pairs) + 1) // 2]
        self.seconds, self.rows = (sum(column) / len(lower) for column in zip(*lower, strict=True))


def _size(rows: int) -> int:
    """Return the half octave of a number of rows: 1, 2, 3, 4–5, 6–7, 8–11, 12–15, 16–22, …"""
    return int(2 * math.log2(rows) + 1e-9)
