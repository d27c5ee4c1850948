"""What is asked of runs: one row a request, followed from asking to outcome.

    pending -> delivered (the trainer's control folder) -> acked (the trainer said so) -> done | failed
    superseded: the run ended otherwise, or something more severe was asked; timed_out: the deadline passed

Every change is an event of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import and_, func, not_, select, text, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from store.checkpoints import starts_from_checkpoint
from store.events import append_event
from store.ids import new_id
from store.leases import end_stuck_sessions
from store.models import Command, Run
from store.runs import CommandRefused, locked_run, transition
from store.session import STILL_S, is_row_held
from store.states import AT_REST, MOVES, STATES, TERMINAL
from store.storable import storable_text

# The state that asking brings a run with a trainer to; a checkpoint changes nothing about what the run is.
_ON_ASKING = {"stop": "stopping", "pause": "pausing", "kill": "killing"}
# What a run that has no trainer becomes at once.
_WITHOUT_TRAINER = {"stop": "stopped", "kill": "cancelled"}
# The states in which each kind is taken.
_TAKEN_IN: dict[str, frozenset[str]] = {
    "checkpoint": frozenset({"running"}),  # one that pauses or stops saves anyway
    "pause": frozenset({"running"}),
    "stop": frozenset(STATES) - TERMINAL - {"killing"},
    "kill": frozenset(STATES) - TERMINAL,
}

# What is asked gives way to what is more severe, and is refused while that is open.
SEVERITY = {"checkpoint": 0, "pause": 1, "rollback": 2, "stop": 3, "kill": 4}

# What is taken back when its deadline passes, since nothing is lost without it; and what the trainer should have done.
WITHDRAWN_LATE = {"pause": "pause", "checkpoint": "save a checkpoint"}

# Which states a user's word brings back into the queue, and by which word.
GOES_ON = {"resume": ("paused", "stopped"), "retry": ("failed", "cancelled")}

_ENDED_HOW = {"stopped": "stopped", "succeeded": "succeeded", "failed": "failed", "cancelled": "been cancelled"}
_ASKED_FOR = {
    "stop": "stopped",
    "kill": "killed",
    "pause": "paused",
    "checkpoint": "asked for a checkpoint",
    "rollback": "rolled back",
    "resume": "resumed",
    "retry": "retried",
}


def command_fields(command: Command) -> dict[str, Any]:
    """A command as events carry it."""

    def moment(value: Any) -> str | None:
        return None if value is None else value.isoformat().replace("+00:00", "Z")

    return {
        "id": command.id,
        "run_id": command.run_id,
        "kind": command.kind,
        "status": command.status,
        "detail": command.detail,
        "outcome": command.outcome,
        "requested_by": command.requested_by,
        "created_at": moment(command.created_at),
        "deadline_at": moment(command.deadline_at),
        "delivered_at": moment(command.delivered_at),
        "acked_at": moment(command.acked_at),
        "finished_at": moment(command.finished_at),
    }


def request_command(
    session: Session,
    run_id: str,
    kind: str,
    requested_by: str | None,
    deadline_s: float,
    payload: dict[str, Any] | None = None,
) -> Command:
    """Ask something of a run: `kill`, `stop`, `pause` or `checkpoint`.

    The same kind while one is open returns the open one. Stopping or killing a run that has no trainer is done at once.
    What is more severe supersedes what is open, never the other way round.

    Raises:
        RunNotFound
        CommandRefused: the run has ended, or its state does not allow what is asked.
    """
    run = _locked_for_kill(session, run_id) if kind == "kill" else locked_run(session, run_id)
    target = _ON_ASKING.get(kind, run.state)
    open_now = open_commands(session, run_id)
    goes_back = any(command.kind == "rollback" for command in open_now)
    withdraws = goes_back and kind in _WITHOUT_TRAINER
    if run.state in TERMINAL and not withdraws:
        raise refuse(run, kind, open_now, target)
    for command in open_now:
        if command.kind == kind:
            return command
    if any(SEVERITY[command.kind] > SEVERITY[kind] for command in open_now):
        raise refuse(run, kind, open_now, target)
    if run.state not in _TAKEN_IN[kind] and not withdraws:
        raise refuse(run, kind, open_now, target)
    supersede(session, open_now, kind)
    command = add_command(session, run_id, kind, requested_by, deadline_s, payload)
    if kind in _WITHOUT_TRAINER and run.state in AT_REST | {"queued"}:
        if run.state not in TERMINAL:
            reason = "killed" if kind == "kill" else "stopped"
            transition(session, run_id, _WITHOUT_TRAINER[kind], actor=requested_by, reason_code=reason)
        withdrawn = "; the roll back was withdrawn" if goes_back else ""
        mark_finished(session, command.id, "done", f"the run had no trainer; no new checkpoint{withdrawn}")
    elif kind in _ON_ASKING and target in MOVES[run.state]:
        transition(session, run_id, target, actor=requested_by, reason_code=kind)
    # Else it is recovering, stopping to be requeued, or being killed: whoever looks after it finds the open command.
    session.refresh(command)
    return command


def _locked_for_kill(session: Session, run_id: str) -> Run:
    """The run's row, locked also where its supervisor was frozen with it: who kills does not wait for a lease."""
    try:
        with session.begin_nested():
            session.execute(text(f"SET LOCAL lock_timeout = {STILL_S * 1000}"))
            return locked_run(session, run_id)
    except OperationalError as error:
        if not is_row_held(error):
            raise
    token = session.scalar(select(Run.lease_token).where(Run.id == run_id))
    if token is not None:
        end_stuck_sessions(session, run_id, token)
    return locked_run(session, run_id)


def request_requeue(session: Session, run_id: str, kind: str, requested_by: str | None) -> Command:
    """Put a run back into the queue: `resume` or `retry`. Done at once.

    It goes on from its newest checkpoint; one that has none starts from the beginning.

    Raises:
        RunNotFound
        CommandRefused: its state is none that this brings back, or a roll back is under way.
    """
    run = locked_run(session, run_id)
    open_now = open_commands(session, run_id)
    if run.state not in GOES_ON[kind] or open_now:
        raise refuse(run, kind, open_now, "queued")
    before = run.state
    command = add_command(session, run_id, kind, requested_by, deadline_s=0)
    transition(
        session, run_id, "queued", actor=requested_by, reason_code=kind, queued_at=func.now(),
        not_before=None, infrastructure_failures=0,
    )  # fmt: skip
    goes_on = starts_from_checkpoint(session, run)
    then = "goes on from its newest checkpoint" if goes_on else "has no checkpoint and starts from the beginning"
    mark_finished(session, command.id, "done", f"it was {before} and is queued; it {then}")
    session.refresh(command)
    return command


def refuse(run: Run, kind: str, open_now: Sequence[Command], target: str | None = None) -> CommandRefused:
    """The refusal of `kind` as the run stands, with a sentence for whoever asked."""
    sentence = refusal_sentence(run, kind)
    severe = next((command for command in open_now if SEVERITY[command.kind] >= SEVERITY.get(kind, 0)), None)
    if severe is not None and run.state != "killing":
        sentence = f"{run.name} cannot be {_ASKED_FOR[kind]} while {noun(severe)} is under way ({severe.id})."
    return CommandRefused(run.state, target or run.state, sorted(MOVES[run.state]), sentence)


def supersede(session: Session, open_now: Sequence[Command], kind: str) -> None:
    """Give what is less severe than `kind` its outcome. Checkpoints are still made on the way, unless it is killed."""
    for command in open_now:
        if SEVERITY[command.kind] < SEVERITY[kind] and (command.kind != "checkpoint" or kind == "kill"):
            mark_finished(session, command.id, "superseded", detail=f"{kind} was asked")


def add_command(
    session: Session,
    run_id: str,
    kind: str,
    requested_by: str | None,
    deadline_s: float,
    payload: dict[str, Any] | None = None,
    command_id: str | None = None,
) -> Command:
    """Write a request down and say so in the run's history. Whether it may be asked is the caller's matter."""
    command = Command(
        id=command_id or new_id("c"),
        run_id=run_id,
        kind=kind,
        payload=payload or {},
        requested_by=requested_by,
        deadline_at=func.now() + timedelta(seconds=deadline_s),
    )
    session.add(command)
    session.flush()
    session.refresh(command)
    _announce(session, command, requested_by)
    return command


def refusal_sentence(run: Run, kind: str) -> str:
    """Why `kind` cannot be asked of the run now, for people: how it ended, or how it stands."""
    if run.state in TERMINAL and kind not in GOES_ON:
        tripped = f" ({run.reason_code})" if run.reason_code in ("gate", "guard") else ""
        return f"{run.name} has already {_ENDED_HOW[run.state]}{tripped} at iteration {run.iteration}."
    if kind in GOES_ON:
        other = next((word for word, states in GOES_ON.items() if run.state in states), None)
        remedy = {
            None: "; roll back with a higher `iterations`, or fork, to train on." if run.state == "succeeded" else ".",
            "resume": "; resume it.",
            "retry": "; retry it.",
        }[other]
        wanted = " or ".join(GOES_ON[kind])
        return f"{run.name} is {run.state}; only a run that is {wanted} can be {_ASKED_FOR[kind]}{remedy}"
    if kind == "pause" and run.state == "paused":
        return f"{run.name} is paused already."
    stands = "being killed" if run.state == "killing" else run.state
    return f"{run.name} is {stands}; it cannot be {_ASKED_FOR[kind]} now."


def noun(command: Command) -> str:
    """What a command asks for, for a sentence: "a stop"."""
    return "a roll back" if command.kind == "rollback" else f"a {command.kind}"


def open_commands(session: Session, run_id: str) -> list[Command]:
    """What is asked of the run and has no outcome yet, oldest first."""
    statement = select(Command).where(Command.run_id == run_id, Command.finished_at.is_(None))
    return list(session.scalars(statement.order_by(Command.created_at, Command.id)))


def mark_delivered(session: Session, command_id: str) -> None:
    """It lies in the control folder of the present attempt."""
    _change(session, command_id, ("pending",), status="delivered", delivered_at=func.now())


def mark_acked(session: Session, command_id: str, detail: str | None = None) -> None:
    """The trainer accepted it."""
    told = None if detail is None else storable_text(detail)
    _change(session, command_id, ("pending", "delivered"), status="acked", acked_at=func.now(), detail=told)


def mark_finished(session: Session, command_id: str, status: str, detail: str | None = None) -> None:
    """Its outcome: done, failed, superseded or timed_out. The first outcome stays."""
    _change(
        session,
        command_id,
        ("pending", "delivered", "acked"),
        status=status,
        finished_at=func.now(),
        detail=Command.detail if detail is None else storable_text(detail),
    )


def finish_late(session: Session, run_id: str, token: int, command_id: str, phase: str | None) -> None:
    """A pause or checkpoint was taken back from a trainer that had not begun with it by the deadline.

    Raises:
        LeaseLost: it is not the caller's to say.
    """
    run = locked_run(session, run_id, expect_token=token)
    kind = session.get_one(Command, command_id).kind
    where = f" in phase {phase}" if phase else ""
    sentence = f"the trainer{where} did not begin to {WITHDRAWN_LATE[kind]} by the deadline; the request was withdrawn"
    mark_finished(session, command_id, "timed_out", f"{sentence} and the run goes on")
    if kind == "pause" and run.state == "pausing":
        transition(session, run_id, "running", expect_token=token, reason_code="pause_timed_out")


def carry_out_kill(session: Session, run: Run, detail: str | None = None) -> Run | None:
    """Cancel a run whose processes are proved gone, if a kill is open; else None. `detail`: what else there was."""
    asked = next((command for command in open_commands(session, run.id) if command.kind == "kill"), None)
    if asked is None:
        return None
    sentence = f"killed by {asked.requested_by}; what it had not saved is lost"
    if detail:
        sentence = f"{sentence} ({detail})"
    run = transition(session, run.id, "cancelled", reason_code="killed", reason_detail=sentence)
    finish_open(session, run.id, {"kill": ("done", "every process of the run is gone")})
    return run


def finish_open(session: Session, run_id: str, outcomes: dict[str, tuple[str, str | None]]) -> None:
    """Give every open command its outcome by kind, now that the run has come to rest; other kinds are superseded.

    A roll back is none that rest fulfils: it stays open, and is carried out from there.
    """
    for command in open_commands(session, run_id):
        if command.kind == "rollback":
            continue
        status, detail = outcomes.get(command.kind, ("superseded", "the run ended first"))
        mark_finished(session, command.id, status, detail)


def time_out_unattended(session: Session) -> int:
    """Time out commands whose deadline passed while nobody looked after their run. Returns how many.

    A roll back whose checkpoint was found whole is done however late: nothing but writing it down is left.
    """
    attended = ("starting", "running", "pausing", "stopping", "killing", "recovering")
    overdue = session.scalars(
        select(Command.id)
        .join(Run, Run.id == Command.run_id)
        .where(
            Command.finished_at.is_(None),
            Command.deadline_at < func.now(),
            Run.state.not_in(attended),
            not_(and_(Command.kind == "rollback", Command.status.in_(("delivered", "acked")))),
        )
    ).all()
    for command_id in overdue:
        mark_finished(session, command_id, "timed_out", "nobody took it up before its deadline")
    return len(overdue)


def _change(session: Session, command_id: str, sources: tuple[str, ...], **values: Any) -> None:
    # The run's row is locked before its commands', here as everywhere.
    run_id = session.scalar(select(Command.run_id).where(Command.id == command_id))
    if run_id is None:
        return
    locked_run(session, run_id)
    changed = session.scalar(
        update(Command)
        .where(Command.id == command_id, Command.status.in_(sources))
        .values(values)
        .returning(Command.id)
        .execution_options(synchronize_session=False)
    )
    if changed is not None:
        command = session.get_one(Command, command_id, populate_existing=True)
        _announce(session, command, None)


def _announce(session: Session, command: Command, actor: str | None) -> None:
    """Write how a command stands into the run's history."""
    run = session.get_one(Run, command.run_id)
    append_event(session, run.id, "command", command_fields(command), segment=run.active_segment, actor=actor)
