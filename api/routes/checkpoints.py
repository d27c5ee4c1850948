"""Checkpoints of a run: list, pin, name, verify, download, delete, and what pruning would do."""

from __future__ import annotations

import threading
import time
from typing import Annotated

from fastapi import APIRouter, Query, Response
from fastapi.responses import StreamingResponse

from api import cursors
from api.archive import Part, open_archive
from api.auth import least
from api.checkpoint_messages import (
    checkpoint_etag,
    checkpoint_message,
    no_checkpoint,
    reading,
    reasons_to_stay,
)
from api.checkpoint_schemas import CheckpointChange, GcItem, GcPreview, Verification
from api.deps import Database, Settings, Who
from api.errors import ProblemError
from api.preconditions import IfMatch, check_if_match
from api.schemas import Checkpoint, Page
from ppo_core.errors import CheckpointError
from ppo_core.rundir import check_stored
from ppo_core.spec.groups import CheckpointsConfig
from store import audit, retention, run_read
from store.checkpoints import change_checkpoint, locked_checkpoint, read_checkpoint, record_verification
from store.models import Checkpoint as CheckpointRow
from store.retention import rules_of

router = APIRouter(prefix="/v1/runs/{run_id}/checkpoints", tags=["checkpoints"])

# Each holds a thread of the process for minutes; the others are for everybody else.
MOST_COMPARED = 4
RETRY_AFTER_S = 30
_COMPARING = threading.BoundedSemaphore(MOST_COMPARED)

KeepLast = Annotated[int | None, Query(ge=-1, le=100_000, description="-1 keeps all. Default: what the run has.")]
KeepEvery = Annotated[int | None, Query(ge=0, le=1_000_000, description="0: no such rule. Default: what the run has.")]
KeepBest = Annotated[int | None, Query(ge=0, le=1000, description="Default: what the run has.")]


@router.get("", openapi_extra=least("viewer"))
def list_checkpoints(
    run_id: str,
    database: Database,
    cursor: Annotated[str | None, Query(max_length=200)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> Page[Checkpoint]:
    """Checkpoints of a run's segments, oldest first, each with the reasons for which it stays."""
    run = run_read.known_run(database, run_id)
    reasons = reasons_to_stay(database, run)
    after = cursors.decode_numbers(cursor) if cursor else None
    rows = run_read.list_checkpoints(database, run_id, after=after, limit=limit + 1)
    last = rows[limit - 1] if len(rows) > limit else None
    return Page[Checkpoint](
        items=[checkpoint_message(row, reasons.get(row.id, ())) for row in rows[:limit]],
        next=cursors.encode(last.segment, last.iteration) if last else None,
    )


# Before `/{checkpoint_id}`, and without a slash: it is about the collection.
@router.get(":gc-preview", openapi_extra=least("viewer"))
def preview_gc(
    run_id: str,
    database: Database,
    keep_last: KeepLast = None,
    keep_every: KeepEvery = None,
    keep_best: KeepBest = None,
) -> GcPreview:
    """What pruning would remove and why the others stay, under the run's rules or others; nothing is done."""
    run = run_read.known_run(database, run_id)
    rules = rules_of(run_read.active_spec(database, run))
    if keep_last == 0:
        raise ProblemError(
            422, "bad_request", "keep_last is 0: nothing to go back to would stay; use at least 1, or -1."
        )
    rules = CheckpointsConfig(
        every=rules.every,
        keep_last=rules.keep_last if keep_last is None else keep_last,
        keep_every=rules.keep_every if keep_every is None else keep_every or None,
        keep_best=rules.keep_best if keep_best is None else keep_best,
    )
    decided = retention.decide(database, run_id, rules, newest_is_verified=True)
    # Read afterwards: a checkpoint that comes in between is here and not there.
    sizes = {row.id: row.bytes for row in run_read.list_checkpoints(database, run_id)}
    return GcPreview(
        items=[
            GcItem(
                checkpoint=decision.checkpoint.id,
                segment=decision.checkpoint.segment,
                iteration=decision.checkpoint.iteration,
                bytes=sizes[decision.checkpoint.id],
                stays=decision.stays,
                reasons=list(decision.reasons),
            )
            for decision in decided
        ],
        freed_bytes=sum(sizes[decision.checkpoint.id] for decision in decided if not decision.stays),
    )


@router.get("/{checkpoint_id}", openapi_extra=least("viewer"))
def read_one_checkpoint(run_id: str, checkpoint_id: str, database: Database, response: Response) -> Checkpoint:
    """One checkpoint, with its ETag."""
    run = run_read.known_run(database, run_id)
    row = _row(database, run_id, checkpoint_id)
    response.headers["ETag"] = checkpoint_etag(row)
    return checkpoint_message(row, reasons_to_stay(database, run).get(row.id, ()))


@router.patch("/{checkpoint_id}", openapi_extra=least("operator"))
def update_checkpoint(
    run_id: str,
    checkpoint_id: str,
    body: CheckpointChange,
    database: Database,
    who: Who,
    response: Response,
    if_match: IfMatch = None,
) -> Checkpoint:
    """Pin a checkpoint, so that it is never removed, or name it."""
    row = _locked(database, run_id, checkpoint_id)
    check_if_match(if_match, checkpoint_etag(row))
    if row.status == "removed":
        raise _gone(row)
    asked = {name: getattr(body, name) for name in body.model_fields_set}
    changes = {name: value for name, value in asked.items() if getattr(row, name) != value}
    if changes:
        words = {"pinned": "pinned" if row.pinned is False else "unpinned", "label": "labelled"}
        change_checkpoint(database, row, " and ".join(words[name] for name in sorted(changes)), who.name, **changes)
        audit.record(database, who.name, "checkpoint.change", row.id, run=run_id, **changes)
    run = run_read.known_run(database, run_id)
    message = checkpoint_message(row, reasons_to_stay(database, run).get(row.id, ()))
    database.commit()
    response.headers["ETag"] = message.etag
    return message


@router.delete("/{checkpoint_id}", status_code=204, openapi_extra=least("operator"))
def delete_checkpoint(
    run_id: str, checkpoint_id: str, database: Database, who: Who, if_match: IfMatch = None
) -> Response:
    """Remove a checkpoint; its files go within seconds. 409 with the reason when something needs it."""
    row = _locked(database, run_id, checkpoint_id)
    check_if_match(if_match, checkpoint_etag(row))
    if row.status != "removed":
        try:
            retention.remove_by_hand(database, row, who.name)
        except retention.CheckpointNeeded as needed:
            raise ProblemError(409, "checkpoint_needed", str(needed)) from needed
        audit.record(database, who.name, "checkpoint.delete", row.id, run=run_id)
        database.commit()
    return Response(status_code=204)


@router.post("/{checkpoint_id}/verify", openapi_extra=least("operator"))
def verify_checkpoint(
    run_id: str, checkpoint_id: str, database: Database, settings: Settings, who: Who
) -> Verification:
    """Compare every file with the manifest, and the manifest with what was recorded. Large ones take minutes."""
    row = _row(database, run_id, checkpoint_id)
    if row.status == "removed":
        raise _gone(row)
    if not _COMPARING.acquire(blocking=False):
        detail = f"{MOST_COMPARED} checkpoints are being compared already; try again when one is through."
        raise ProblemError(503, "busy", detail, headers={"Retry-After": str(RETRY_AFTER_S)})
    begun, fault, files, size = time.monotonic(), None, 0, 0
    try:
        with reading(database, checkpoint_id):
            files, size = check_stored(settings.data_dir / "runs" / run_id, row.path, row.manifest_sha256)
    except CheckpointError as error:
        fault = str(error)
    finally:
        _COMPARING.release()
    seconds = time.monotonic() - begun
    found = record_verification(database, run_id, checkpoint_id, fault, who.name)
    if found is None:
        database.rollback()
        raise _gone(_row(database, run_id, checkpoint_id))
    audit.record(database, who.name, "checkpoint.verify", row.id, run=run_id, ok=fault is None)
    database.commit()
    return Verification(
        ok=fault is None,
        status="good" if fault is None else "damaged",
        detail=fault,
        files=files,
        bytes=size,
        seconds=round(seconds, 3),
    )


@router.get(
    "/{checkpoint_id}/download",
    openapi_extra=least("viewer"),
    response_class=Response,
    responses={200: {"description": "A tar file.", "content": {"application/x-tar": {}}}},
)
def download_checkpoint(
    run_id: str,
    checkpoint_id: str,
    database: Database,
    settings: Settings,
    part: Annotated[Part, Query(description="policy: only the folder that transformers and vLLM load.")] = "all",
) -> Response:
    """A checkpoint as a tar file. A transfer that ends short of its Content-Length met a damaged file.

    410 when it was removed, 409 when it is known to be damaged.
    """
    row = _row(database, run_id, checkpoint_id)
    if row.status == "removed":
        raise _gone(row)
    if row.status == "damaged":
        raise ProblemError(409, "checkpoint_damaged", f"{row.id} is damaged: {row.status_detail}")
    name = f"{run_id}-segment-{row.segment}-iteration-{row.iteration}{'-policy' if part == 'policy' else ''}"
    run_dir = settings.data_dir / "runs" / run_id
    try:
        with reading(database, checkpoint_id):
            archive = open_archive(run_dir, row.path, row.manifest_sha256, part, name)
    except CheckpointError as error:
        raise ProblemError(409, "checkpoint_damaged", f"{row.id} cannot be sent: {error}. Verify it.") from error
    headers = {"Content-Length": str(archive.bytes), "Content-Disposition": f'attachment; filename="{name}.tar"'}
    return StreamingResponse(archive.chunks(), headers=headers, media_type="application/x-tar")


def _row(database: Database, run_id: str, checkpoint_id: str) -> CheckpointRow:
    row = read_checkpoint(database, run_id, checkpoint_id)
    if row is None:
        run_read.known_run(database, run_id)
        raise no_checkpoint(run_id, checkpoint_id)
    return row


def _locked(database: Database, run_id: str, checkpoint_id: str) -> CheckpointRow:
    row = locked_checkpoint(database, run_id, checkpoint_id)
    if row is None:
        raise no_checkpoint(run_id, checkpoint_id)
    return row


def _gone(row: CheckpointRow) -> ProblemError:
    return ProblemError(410, "checkpoint_removed", f"{row.id} was removed: {row.status_detail}.")
