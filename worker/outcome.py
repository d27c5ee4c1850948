"""What an ended attempt means for its run: decided from the journal's `end`, then written in one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy.orm import Session

from ppo_core.rundir import ExitCode, RankExit, RankFault, describe_exits, end_error, first_lost, no_space_left
from store import recovery
from store.commands import carry_out_kill, finish_open, open_commands
from store.models import Run
from store.rollback import OpenRollback, go_back, open_rollback
from store.runs import locked_run, transition

Kind = Literal["succeeded", "paused", "stopped", "failed", "requeued", "cancelled", "lost"]
# Why the supervisor itself ended the trainer, if it did.
EndedBy = Literal["loading_stop", "deadline", "stalled", "rank_lost", "kill"]
# Codes of ends by what watches the run.
TRIPPED = frozenset({"gate", "guard"})


@dataclass(frozen=True)
class Outcome:
    """What became of an attempt."""

    kind: Kind
    code: str
    detail: str | None = None
    hint: str | None = None


def stopped_unasked(end: dict[str, Any], ended_by: EndedBy | None, asked: bool) -> bool:
    """Whether a trainer says that it stopped only because it was ended for a fault, and nobody had asked for a stop.

    It obeyed the signal and saved; its run did not come to rest by anybody's wish, and goes on.
    """
    return end.get("code") == ExitCode.STOPPED and ended_by in ("stalled", "rank_lost") and not asked


def _roll_back(session: Session, run: Run, token: int, outcome: Outcome, back: OpenRollback) -> Run | None:
    """Go back now that the attempt has ended, however it did; None when its checkpoint is no longer there.

    An end that the run came to by itself is written first: its history tells both.
    """
    reason = {"reason_code": outcome.code, "reason_detail": outcome.detail, "hint": outcome.hint}
    own_end = outcome.kind in ("succeeded", "failed") or outcome.code in TRIPPED
    if back.target is None or back.target.status != "good":
        to = None
    elif run.state == "killing":
        to = "cancelled"
    elif own_end:
        to = "stopped" if outcome.kind == "paused" else outcome.kind
    else:
        to = "recovering" if outcome.kind == "lost" else "stopping"
    if to is not None and run.state != to:
        _as_started(session, run, to, token)
        transition(session, run.id, to, expect_token=token, **reason)
    # What made it rest is no news; what was lost thereby is.
    note = outcome.detail if outcome.kind in ("lost", "cancelled") or own_end else None
    if outcome.kind == "lost":
        note = f"{note}; what it had not saved is lost"
    return go_back(session, run.id, back, note)


def _as_started(session: Session, run: Run, to: str, token: int) -> None:
    """Write down that the trainer had started, where only its word about how it ended has come through."""
    if run.state == "starting" and to in ("paused", "stopped", "succeeded", "requeued"):
        transition(session, run.id, "running", expect_token=token)


def from_end(end: dict[str, Any], saved_iteration: int | None, draining: bool) -> Outcome:
    """What the trainer's own last word means."""
    reason = str(end.get("reason") or "")
    error = end_error(end)
    why = str(end.get("why") or "")
    saved = None if saved_iteration is None else f"saved at iteration {saved_iteration}"
    hint = str(end["hint"]) if end.get("hint") else None
    tripped = "; ".join(part for part in (why, saved) if part) or None
    match end.get("code"):
        case ExitCode.DONE:
            return Outcome("succeeded", "goal")
        case ExitCode.PAUSED if error:  # It cannot go on as things are, and loses no more than since its checkpoint.
            return Outcome("paused", reason, str(error.get("message") or ""), error.get("hint"))
        case ExitCode.PAUSED:
            return Outcome("paused", reason or "paused", tripped, hint)
        case ExitCode.STOPPED:
            return Outcome("requeued", "drained", saved) if draining else Outcome("stopped", "stopped", saved)
        case ExitCode.GATE_OR_GUARD:
            return Outcome("stopped", reason or "guard", tripped, hint)
        case ExitCode.DRAINED:
            return Outcome("requeued", "drained", saved)
        case ExitCode.BAD_SPEC | ExitCode.DATA_OR_REWARD | ExitCode.FAULT:
            return Outcome(
                "failed",
                str(error.get("code") or "trainer_fault"),
                str(error.get("message") or f"the trainer ended with code {end['code']}"),
                error.get("hint"),
            )
    return Outcome("failed", "trainer_fault", f"the trainer ended with the unknown code {end.get('code')!r}")


def from_fault(fault: RankFault) -> Outcome:
    """What it means that a rank failed by itself, so that rank 0 could not go on and left no last word."""
    return Outcome("failed", fault.code, str(fault), fault.hint)


def without_end(exits: Sequence[RankExit], ended_by: EndedBy | None, why: str | None, draining: bool) -> Outcome:
    """What it means that the trainer left no last word. `why` is what made the supervisor end it."""
    match ended_by:
        case "kill":
            return Outcome("cancelled", "killed")
        case "loading_stop":
            return Outcome(
                "requeued" if draining else "stopped",
                "drained" if draining else "stopped",
                "ended while it was loading; no new checkpoint",
            )
        case "deadline" if draining:
            return Outcome("requeued", "drained", f"{why}; what it had not saved is lost")
        case "deadline":
            return Outcome("cancelled", "stop_deadline", f"{why}; what it had not saved is lost")
        case "stalled":
            return Outcome("lost", "stalled", f"the trainer was ended: {why}")
    hint = "Look at the end of the attempt's log."
    if len(exits) > 1:
        hint = f"Look at the end of the log of the attempt's rank {first_lost(exits)}."
    if any(exit.killed for exit in exits):
        hint = "Signal 9 from outside is most often the kernel, out of memory: look at the machine's log."
    return Outcome("lost", "trainer_lost", f"trainer ended without a word ({describe_exits(exits)})", hint)


def without_files(error: OSError, started: bool) -> Outcome:
    """What it means that the run's folder or the trainer's program cannot be used."""
    if no_space_left(error):
        return Outcome(
            "paused", "disk_full", str(error), "Free space on the disk of PPO_DATA_DIR, then resume the run."
        )
    if started:
        return Outcome("lost", "run_folder", str(error), "Look at the disk that the run's folder lies on.")
    return Outcome("failed", "trainer_start", str(error), "Look at PPO_TRAINER_COMMAND and at the run's folder.")


def write_outcome(session: Session, run_id: str, token: int, outcome: Outcome) -> Run:
    """Bring the run to rest, its commands with it, all in the caller's transaction.

    The caller has proved that no process of the attempt is left.

    Raises:
        LeaseLost: the outcome of this attempt no longer counts.
    """
    run = locked_run(session, run_id, expect_token=token)
    killed = carry_out_kill(session, run)  # However the attempt ended: who killed the run wants it gone, and it is.
    if killed is not None:
        return killed
    asked = {command.kind for command in open_commands(session, run_id)}
    reason = {"reason_code": outcome.code, "reason_detail": outcome.detail, "hint": outcome.hint}
    kind = outcome.kind
    back = open_rollback(session, run_id)
    if back is not None and back.verified:
        went = _roll_back(session, run, token, outcome, back)
        if went is not None:
            return went
        # Its checkpoint went in the last moment. The run came to rest for nothing else: it goes on where it was.
        run = locked_run(session, run_id, expect_token=token)
        if kind in ("stopped", "cancelled", "paused") and outcome.code not in TRIPPED:
            kind, reason["reason_code"] = "requeued", "rollback_failed"
    if kind == "requeued" and "stop" in asked:
        kind, reason["reason_code"] = "stopped", "stopped"
    if kind == "paused" and run.state == "stopping":
        kind = "stopped"  # it had paused before the stop reached it; either way it stands still with a checkpoint
    _as_started(session, run, kind, token)
    match kind:
        case "lost":
            transition(session, run_id, "recovering", expect_token=token, **reason)
            return recovery.settle(
                session,
                run_id,
                expect_token=token,
                code=outcome.code,
                detail=outcome.detail or "",
                hint=outcome.hint,
            )
        case "requeued":
            if run.state != "stopping":
                transition(session, run_id, "stopping", expect_token=token, **reason)
            return transition(session, run_id, "queued", expect_token=token, **reason)
        case "cancelled":
            if run.state != "killing":
                transition(session, run_id, "killing", expect_token=token, **reason)
            run = transition(session, run_id, "cancelled", expect_token=token, **reason)
            finish_open(session, run_id, {"stop": ("timed_out", outcome.detail)})
        case "paused":
            run = transition(session, run_id, "paused", expect_token=token, **reason)
            finish_open(session, run_id, {"pause": ("done", outcome.detail)})
        case "stopped":
            run = transition(session, run_id, "stopped", expect_token=token, **reason)
            finish_open(session, run_id, {"stop": ("done", outcome.detail)})
        case "succeeded":
            run = transition(session, run_id, "succeeded", expect_token=token, **reason)
            finish_open(session, run_id, {"stop": ("superseded", "the run reached its goal first")})
        case "failed":
            run = transition(session, run_id, "failed", expect_token=token, **reason)
            finish_open(session, run_id, {})
    return run
