"""States of a batch and transitions between them: functions of a StoredJob, without effect in any other state.

    validating ─► in_progress ─► finalizing ─► completed
        │              │              └──────► expired       (deadline passed: unanswered lines become errors)
        ▼              └─► cancelling ───────► cancelled     (unanswered lines become errors)
      failed

A batch that is cancelled or expires while validating ends without files. Any open state leads to failed once the input
is missing or changed, or the answers are damaged.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tok_client.types import (
    Batch,
    BatchError,
    BatchErrors,
    BatchRequestCounts,
    BatchUsage,
    InputTokensDetails,
    OutputTokensDetails,
)
from tok_server.batch.storage.answers import Totals
from tok_server.batch.storage.output_lines import UnansweredReason
from tok_server.batch.storage.store import StoredJob
from tok_server.batch.storage.validation import ValidationResult

EarlyEndReason = Literal["cancelled", "expired"]
CANCELLABLE_STATUSES = ("validating", "in_progress")


def validated(job: StoredJob, result: ValidationResult, now: int) -> StoredJob:
    """Start the batch, or fail it with the errors of its input."""
    if job.batch.status != "validating":
        return job
    if result.errors:
        errors = BatchErrors(data=result.errors)
        return _with(job, status="failed", failed_at=now, errors=errors, request_counts=BatchRequestCounts())
    started = _with(job, status="in_progress", in_progress_at=now)
    return with_totals(msgspec.structs.replace(started, lines=result.lines, digest=result.digest), Totals())


def failed(job: StoredJob, error: BatchError, now: int) -> StoredJob:
    """Fail the batch, from any open state."""
    if not job.open:
        return job
    return _with(job, status="failed", failed_at=now, errors=BatchErrors(data=[error]))


def end_early(job: StoredJob, reason: EarlyEndReason, now: int) -> StoredJob:
    """Begin to end the batch with the lines answered so far."""
    if job.batch.status not in CANCELLABLE_STATUSES:
        return job
    if reason == "cancelled":
        return _with(job, status="cancelling", cancelling_at=now)
    return msgspec.structs.replace(_with(job, status="finalizing", finalizing_at=now), expired=True)


def answered(job: StoredJob, now: int) -> StoredJob:
    """Begin to finalise the batch: all its lines are answered."""
    return _with(job, status="finalizing", finalizing_at=now) if job.batch.status == "in_progress" else job


def unanswered_reason(job: StoredJob) -> UnansweredReason | None:
    """Return why lines may have no answer; None: every line has one."""
    if job.batch.status == "cancelling":
        return "batch_cancelled"
    return "batch_expired" if job.expired else None


def finished(job: StoredJob, totals: Totals, output: str | None, errors: str | None, now: int) -> StoredJob:
    """End the batch: its files are written."""
    match job.batch.status, job.expired:
        case "cancelling", _:
            ended = _with(job, status="cancelled", cancelled_at=now)
        case "finalizing", True:
            ended = _with(job, status="expired", expired_at=now)
        case "finalizing", False:
            ended = _with(job, status="completed", completed_at=now)
        case _:
            return job
    return with_totals(_with(ended, output_file_id=output, error_file_id=errors), totals)


def with_totals(job: StoredJob, totals: Totals) -> StoredJob:
    """Return the job with the counts and usage of `totals`."""
    counts = BatchRequestCounts(total=job.lines, completed=totals.completed, failed=totals.failed)
    token_usage = BatchUsage(
        input_tokens=totals.input_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=totals.cached_tokens),
        output_tokens=totals.output_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=totals.reasoning_tokens),
        total_tokens=totals.input_tokens + totals.output_tokens,
    )
    return _with(job, request_counts=counts, usage=token_usage)


def _with(job: StoredJob, **fields: object) -> StoredJob:
    batch: Batch = msgspec.structs.replace(job.batch, **fields)
    return msgspec.structs.replace(job, batch=batch)
