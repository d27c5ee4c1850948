"""Checkpoints as they are sent: fields, ETag, the reasons for which each stays, and a disk that does not answer."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence

from sqlalchemy.orm import Session

from api.errors import ProblemError
from api.schemas import Checkpoint
from store import retention, run_read
from store.models import Checkpoint as CheckpointRow
from store.models import Run
from store.retention import rules_of


def no_checkpoint(run_id: str, name: str) -> ProblemError:
    """404 for a checkpoint by a name that is no id of one; `ppo` takes other names, and REST does not."""
    listed = f"GET /v1/runs/{run_id}/checkpoints"
    detail = f"There is no checkpoint {name[:100]!r}. REST takes ids, k-..., which {listed} has."
    return ProblemError(404, "not_found", detail)


@contextlib.contextmanager
def reading(database: Session, checkpoint_id: str) -> Iterator[None]:
    """Read a checkpoint's files: 503 where the disk is away or gives errors, which says nothing about the checkpoint.

    No transaction waits for a disk: the present one ends, and rows that were read belong to no session any more.
    """
    database.expunge_all()  # Else the first look at a row would begin another transaction.
    database.rollback()
    try:
        yield
    except OSError as error:
        detail = (
            f"Checkpoint {checkpoint_id} could not be read, so nobody knows whether it is whole: {error}; ask again "
            "when the disk answers."
        )
        raise ProblemError(503, "storage_unreadable", detail) from error


def reasons_to_stay(database: Session, run: Run) -> dict[str, tuple[str, ...]]:
    """Why each checkpoint stays, under the rules that the run has now; nothing for one that may go."""
    rules = rules_of(run_read.active_spec(database, run))
    decided = retention.decide(database, run.id, rules, newest_is_verified=True)
    return {decision.checkpoint.id: decision.reasons for decision in decided if decision.stays}


def checkpoint_message(row: CheckpointRow, reasons: Sequence[str]) -> Checkpoint:
    """A checkpoint as it is sent."""
    derived = {"protected", "etag"}
    return Checkpoint(
        **{name: getattr(row, name) for name in Checkpoint.model_fields.keys() - derived},
        protected=list(reasons),
        etag=checkpoint_etag(row),
    )


def checkpoint_etag(row: CheckpointRow) -> str:
    """Rises with what people change or have to see changed; that a pruner looked at the files is neither."""
    seen = json.dumps([row.id, row.status, row.pinned, row.label])
    return f'"{hashlib.sha256(seen.encode()).hexdigest()[:16]}"'
