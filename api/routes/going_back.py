"""Going back and going on: roll back, fork, resume, retry, pause, and a checkpoint now."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from api.auth import least
from api.deps import Database, Hint, Settings, Who
from api.errors import ProblemError, not_found
from api.going_back import Plan, fork_preview, plan, rollback_preview
from api.idempotent import IdempotencyKey, make_once, request_of
from api.lineage_schemas import ForkBody, ForkPreview, RollbackBody, RollbackPreview
from api.preconditions import IfMatch, check_if_match, run_etag
from api.routes.runs import ask, made_run
from api.schemas import Command, Run
from store import audit, run_read
from store.checkpoints import locked_checkpoint, longest_comparison_s
from store.commands import request_requeue
from store.rollback import StaleVersion, TargetUnusable, Wish, request_rollback, usable
from store.runs import ForkStart, create_run

router = APIRouter(prefix="/v1/runs/{run_id}", tags=["runs"])

# Both wait for an update under way, which may be long; then the request is withdrawn and the run goes on.
PAUSE_DEADLINE_S = 600.0
CHECKPOINT_DEADLINE_S = 600.0

DryRun = Annotated[bool, Query(description="Only say what it would mean; nothing is stored.")]


@router.post(
    "/rollback",
    status_code=202,
    response_model=Command,
    openapi_extra=least("operator"),
    responses={200: {"model": RollbackPreview, "description": "With dry_run: what it would do."}},
)
def roll_back_run(
    run_id: str,
    body: RollbackBody,
    database: Database,
    settings: Settings,
    who: Who,
    key: IdempotencyKey = None,
    if_match: IfMatch = None,
    dry_run: DryRun = False,
) -> Command | Response:
    """Go back to a checkpoint, with changed settings if wanted, whatever the run is doing. Nothing is deleted.

    The new segment takes the settings of the checkpoint's own, then `set`. Needs Idempotency-Key, and If-Match with
    the run's ETag, unless dry_run. A checkpoint that proves damaged fails the command, and the run goes on.
    """
    if dry_run:
        found = plan(database, settings, run_id, body.checkpoint, body.set, fork=False)
        return Response(rollback_preview(found).model_dump_json(), media_type="application/json")
    request = request_of(key, f"POST /v1/runs/{run_id}/rollback", who.principal, body.model_dump(exclude_unset=True))

    def prepare() -> Plan:
        if if_match is None:
            _seen_version(database, run_id, None)
        return plan(database, settings, run_id, body.checkpoint, body.set, fork=False)

    def make(command_id: str, found: Plan) -> None:
        # Not before: a repetition that came at the same moment is no stale one.
        version = _seen_version(database, run_id, if_match)
        wish = Wish(body.checkpoint, found.then, body.set, body.reason)
        _ask_rollback(database, run_id, wish, command_id, who, version, longest_comparison_s(found.target.bytes))

    made = make_once(database, request, "c", prepare, make)
    command = run_read.find_command(database, run_id, made.id) if made.id else None
    if command is None:
        raise not_found("command", made.id)
    return Command.model_validate(command)


@router.post(
    "/forks",
    status_code=201,
    response_model=Run,
    openapi_extra=least("operator"),
    responses={200: {"model": ForkPreview, "description": "With dry_run: what it would be."}},
)
def fork_run(
    run_id: str,
    body: ForkBody,
    database: Database,
    settings: Settings,
    who: Who,
    hint: Hint,
    response: Response,
    key: IdempotencyKey = None,
    dry_run: DryRun = False,
) -> Run | Response:
    """Queue a new run that goes on from a checkpoint of this one. This one is not touched."""
    if dry_run:
        found = plan(database, settings, run_id, body.checkpoint, body.set, fork=True, name=body.name)
        return Response(fork_preview(found).model_dump_json(), media_type="application/json")
    request = request_of(key, f"POST /v1/runs/{run_id}/forks", who.principal, body.model_dump(exclude_unset=True))

    def prepare() -> Plan:
        return plan(database, settings, run_id, body.checkpoint, body.set, fork=True, name=body.name)

    def make(fork_id: str, found: Plan) -> None:
        name = body.name or f"{found.run_name[:121]} (fork)"
        _hold(database, run_id, found.target.id)
        create_run(
            database,
            run_id=fork_id,
            name=name,
            spec={**found.then, "name": name},
            num_iterations=found.spec.iterations,
            priority=found.spec.resources.priority,
            gpus=found.spec.resources.gpus,
            created_by=who.name,
            fork=ForkStart(found.target.id, found.target.iteration, body.reason),
        )
        detail = {"checkpoint": body.checkpoint, "set": body.set, "reason": body.reason, "from": run_id}
        audit.record(database, who.name, "run.fork", fork_id, **detail)

    made = make_once(database, request, "r", prepare, make)
    if made.now:
        hint.send()
    return made_run(database, made.id, response)


@router.post("/resume", status_code=202, openapi_extra=least("operator"))
def resume_run(run_id: str, database: Database, who: Who, hint: Hint) -> Command:
    """Queue a paused or stopped run again. Done at once.

    It goes on from its newest good checkpoint, or from the beginning without one.
    """
    return _requeue(database, run_id, "resume", who, hint)


@router.post("/retry", status_code=202, openapi_extra=least("operator"))
def retry_run(run_id: str, database: Database, who: Who, hint: Hint) -> Command:
    """Queue a failed or cancelled run again, as a resume does, with a whole budget for losses. Done at once."""
    return _requeue(database, run_id, "retry", who, hint)


@router.post("/pause", status_code=202, openapi_extra=least("operator"))
def pause_run(run_id: str, database: Database, who: Who) -> Command:
    """Save and give the worker's slot back until the run is resumed. Asking again returns the same open command.

    A trainer that has not begun to by the deadline trains on: the command is timed_out, and the run is running.
    """
    return ask(database, run_id, "pause", who, PAUSE_DEADLINE_S)


@router.post("/checkpoint", status_code=202, openapi_extra=least("operator"))
def save_run(run_id: str, database: Database, who: Who) -> Command:
    """Save after the present iteration and go on. Asking again returns the same open command.

    One that has not begun by the deadline is timed_out and not made any more.
    """
    return ask(database, run_id, "checkpoint", who, CHECKPOINT_DEADLINE_S)


def _ask_rollback(
    database: Database, run_id: str, wish: Wish, command_id: str, who: Who, version: int | None, deadline_s: float
) -> None:
    try:
        request_rollback(
            database,
            run_id,
            wish,
            command_id=command_id,
            requested_by=who.name,
            version=version,
            deadline_s=deadline_s,
        )
    except StaleVersion as error:
        sentence = f"The run is at {run_etag(error.version)} now: read it again, then decide."
        raise ProblemError(412, "if_match_stale", sentence) from error
    except TargetUnusable as error:
        raise ProblemError(409, error.code, str(error)) from error
    detail = {"checkpoint": wish.checkpoint_id, "set": wish.settings, "reason": wish.reason, "command": command_id}
    audit.record(database, who.name, "run.rollback", run_id, **detail)


def _requeue(database: Database, run_id: str, kind: str, who: Who, hint: Hint) -> Command:
    command = request_requeue(database, run_id, kind, who.name)
    audit.record(database, who.name, f"run.{kind}", run_id, command=command.id)
    database.commit()
    hint.send()
    return Command.model_validate(command)


def _hold(database: Database, run_id: str, checkpoint_id: str) -> None:
    """See once more that the checkpoint is there; until the commit nobody removes it."""
    try:
        usable(locked_checkpoint(database, run_id, checkpoint_id), checkpoint_id)
    except TargetUnusable as error:
        raise ProblemError(409, error.code, str(error)) from error


def _seen_version(database: Database, run_id: str, if_match: str | None) -> int | None:
    """The version that the caller looked at; None when any will do."""
    run = run_read.known_run(database, run_id)
    check_if_match(if_match, run_etag(run.version))
    return None if if_match and if_match.strip() == "*" else run.version
