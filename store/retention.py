"""Which checkpoints of a run stay, and why: what the database knows, under `ppo_core.retention`'s rules.

The preview, a person's deletion and the pruner all ask here, and every removal is decided again under the run's lock:
a pin, a fork or a roll back that came a moment before counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from ppo_core.retention import (
    GATE_METRIC,
    Decision,
    History,
    Kept,
    OnlyWhatIsNeeded,
    RetentionRules,
    Stretch,
    decisions,
)
from ppo_core.spec.groups import CheckpointsConfig
from store.alerts import open_onsets
from store.checkpoints import change_checkpoint, locked_checkpoint, present_checkpoints, starting_points
from store.metrics_read import active_line
from store.models import Checkpoint, MetricDef, MetricPoint, Run, RunEvent, Segment
from store.runs import locked_run
from store.states import LIVE


def rules_of(spec: Mapping[str, Any]) -> CheckpointsConfig:
    """What a stored spec says about keeping; all stay if it cannot be read."""
    try:
        return CheckpointsConfig.model_validate(spec.get("checkpoints") or {})
    except ValidationError:
        return CheckpointsConfig(keep_last=-1)


class CheckpointNeeded(Exception):
    """A checkpoint cannot be removed; the message says by what it is needed, and what to do."""


def decide(session: Session, run_id: str, rules: RetentionRules, *, newest_is_verified: bool = False) -> list[Decision]:
    """What becomes of each checkpoint of a run that nobody removed, newest first.

    `newest_is_verified` takes for granted what the pruner looks at before it removes anything: that the newest
    checkpoint is whole. So a preview says what will happen.
    """
    rows = present_checkpoints(session, run_id)
    kept = kept_records(session, run_id, rows)
    if newest_is_verified:
        sound = [place for place, record in enumerate(kept) if record.verified is not False]
        for place in sound[-1:]:
            kept[place] = replace(kept[place], verified=True)
    return decisions(kept, rules, history(session, run_id))


def kept_records(session: Session, run_id: str, rows: Sequence[Checkpoint]) -> list[Kept]:
    """Rows as retention sees them, in their order."""
    needed = needed_elsewhere(session, run_id)
    return [
        Kept(
            id=row.id,
            segment=row.segment,
            iteration=row.iteration,
            verified=False if row.status == "damaged" else True if row.verified_at is not None else None,
            pinned=row.pinned,
            judge_score=row.judge_score,
            protected_reason=needed.get(row.id),
        )
        for row in rows
    ]


def history(session: Session, run_id: str) -> History:
    """The run's present line, the gates held on it, and where its open alerts began."""
    line = active_line(session, run_id)
    gates = session.execute(
        select(MetricPoint.segment, MetricPoint.iteration)
        .join(MetricDef, MetricDef.id == MetricPoint.metric_id)
        .where(MetricPoint.run_id == run_id, MetricDef.name == GATE_METRIC)
    ).all()
    held = [
        iteration
        for segment, iteration in gates
        if any(piece.segment == segment and piece.first <= iteration <= piece.last for piece in line)
    ]
    # The active segment is always the newest, so a roll back left the one before its own.
    opened = select(Segment.number).where(Segment.run_id == run_id, Segment.kind == "rollback")
    return History(
        line=tuple(Stretch(piece.segment, piece.first, piece.last) for piece in line),
        gates=tuple(sorted(held)),
        onsets=open_onsets(session, run_id),
        left=tuple(number - 1 for number in session.scalars(opened)),
    )


def needed_elsewhere(session: Session, run_id: str) -> dict[str, str]:
    """Checkpoints that a segment, a fork, an open roll back or a live trainer needs: id to a sentence that says so."""
    return {**_in_use(session, run_id), **starting_points(session, run_id)}


def remove(session: Session, run_id: str, checkpoint_id: str, rules: RetentionRules, token: int) -> bool:
    """Say that a checkpoint goes, before its files do; False if it stays after all, or if the lease was lost."""
    if locked_run(session, run_id).lease_token != token:
        return False
    decision = next((d for d in decide(session, run_id, rules) if d.checkpoint.id == checkpoint_id), None)
    row = locked_checkpoint(session, run_id, checkpoint_id)
    if decision is None or decision.stays or row is None:
        return False
    change_checkpoint(session, row, "removed", status="removed", status_detail=decision.reasons[0])
    return True


def remove_by_hand(session: Session, row: Checkpoint, actor: str) -> None:
    """A person's removal of a locked checkpoint, which neither the spec's rules nor a way to undo a roll back hold.

    Raises:
        CheckpointNeeded: something else does.
    """
    kept = kept_records(session, row.run_id, present_checkpoints(session, row.run_id))
    past = replace(history(session, row.run_id), left=())
    decision = next((d for d in decisions(kept, OnlyWhatIsNeeded(), past) if d.checkpoint.id == row.id), None)
    if decision is not None and decision.stays and not _only_damaged(decision):
        reasons = "; ".join(decision.reasons)
        if decision.checkpoint.pinned and len(decision.reasons) == 1:
            raise CheckpointNeeded(f"{row.id} is pinned: take the pin away first.")
        raise CheckpointNeeded(f"{row.id} has to stay: {reasons}.")
    change_checkpoint(session, row, "removed", actor, status="removed", status_detail=f"deleted by {actor}")


def _only_damaged(decision: Decision) -> bool:
    """A damaged one that nothing needs waits for nothing when a person says that it can go."""
    kept = decision.checkpoint
    return kept.verified is False and not kept.pinned and kept.protected_reason is None


def _in_use(session: Session, run_id: str) -> dict[str, str]:
    """What the trainer of a live attempt said that it loaded."""
    state, token = session.execute(select(Run.state, Run.lease_token).where(Run.id == run_id)).one_or_none() or ("", 0)
    if state not in LIVE:
        return {}
    said = session.scalar(
        select(RunEvent.payload)
        .where(RunEvent.run_id == run_id, RunEvent.type == "started")
        .order_by(RunEvent.seq.desc())
        .limit(1)
    )
    loaded = str((said or {}).get("resumed_from") or "")
    if not loaded or (said or {}).get("token") != token:
        return {}
    return {
        row.id: "the running trainer has loaded it"
        for row in present_checkpoints(session, run_id)
        if loaded.endswith(f"/{run_id}/{row.path}")
    }
