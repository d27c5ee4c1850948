"""Runs: submit, list, read, change, delete, stop, kill, and what became of a command."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from api import cursors
from api.auth import least
from api.deps import Database, Hint, Settings, Who
from api.errors import ProblemError, not_found
from api.idempotent import IdempotencyKey, make_once, request_of
from api.preconditions import IfMatch, check_if_match, run_etag
from api.schemas import AlertCounts, Command, DryRun, Page, Run, RunChange, RunDetail, SpecBody
from api.specs import Submission, accept_submission, spec_fields, spec_yaml
from ppo_core.estimate import estimate
from store import alert_rules, audit, run_read
from store.commands import open_commands, request_command
from store.deletion import delete_run
from store.fleet import list_workers, most_gpus
from store.run_read import RunStanding
from store.runs import change_run, create_run, locked_run
from store.states import State

router = APIRouter(prefix="/v1/runs", tags=["runs"])

STOP_DEADLINE_S = 60.0  # Time for a last checkpoint before the trainer is ended by force.
# Seconds where the supervisor is well, a lease and its recovery where it is not. What comes after a kill is nothing,
# so one that is late stays open until the processes are gone.
KILL_DEADLINE_S = 60.0


@router.post(
    "",
    status_code=201,
    response_model=Run,
    openapi_extra=least("operator"),
    responses={200: {"model": DryRun, "description": "With dry_run: what it would do."}},
)
def submit_run(
    body: SpecBody,
    database: Database,
    settings: Settings,
    who: Who,
    hint: Hint,
    response: Response,
    key: IdempotencyKey = None,
    dry_run: Annotated[bool, Query(description="Only say what the spec would do.")] = False,
) -> Run | Response:
    """Queue a run. A spec with faults is refused with every fault named, and nothing is stored.

    What its `alerts` group leaves out comes from the platform's alert rules and is stored with the run.
    """
    if dry_run:
        return Response(_dry_run(body, database, settings).model_dump_json(), media_type="application/json")
    request = request_of(key, "POST /v1/runs", who.principal, body.model_dump(exclude_none=True))

    def prepare() -> Submission:
        return _accept(body, database, settings)

    def make(run_id: str, submission: Submission) -> None:
        spec = submission.spec
        create_run(
            database,
            run_id=run_id,
            name=spec.name,
            spec=spec_fields(spec),
            num_iterations=spec.iterations,
            priority=spec.resources.priority,
            gpus=spec.resources.gpus,
            created_by=who.name,
        )
        audit.record(database, who.name, "run.submit", run_id, from_alert_rules=list(submission.from_alert_rules))

    made = make_once(database, request, "r", prepare, make)
    if made.now:
        hint.send()
    return made_run(database, made.id, response)


@router.get("", openapi_extra=least("viewer"))
def list_runs(
    database: Database,
    state: Annotated[list[State] | None, Query(description="Only runs in these states.")] = None,
    match: Annotated[
        str | None, Query(min_length=1, max_length=200, description="Only runs whose id or name begins with this.")
    ] = None,
    cursor: Annotated[str | None, Query(max_length=200)] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Page[Run]:
    """Runs, newest first."""
    before = cursors.decode_time_and_id(cursor) if cursor else None
    standings = run_read.list_runs(database, states=state or (), match=match, before=before, limit=limit + 1)
    more, standings = len(standings) > limit, standings[:limit]
    last = standings[-1].run if more else None
    return Page[Run](
        items=[run_message(standing) for standing in standings],
        next=cursors.encode(last.created_at.isoformat(), last.id) if last else None,
    )


@router.get("/{run_id}", openapi_extra=least("viewer"))
def read_run(run_id: str, database: Database, response: Response) -> RunDetail:
    """A run as it stands, with its full effective spec. Its ETag changes with its state, segment and roll backs."""
    message = _detail(database, run_id)
    # Iterations and metrics leave the version alone, or nobody could ever roll back a run that trains.
    response.headers["ETag"] = run_etag(message.version)
    return message


@router.patch("/{run_id}", openapi_extra=least("operator"))
def change_run_labels(
    run_id: str, body: RunChange, database: Database, who: Who, response: Response, if_match: IfMatch = None
) -> RunDetail:
    """Rename a run, write notes on it, or change its place in the queue. Needs If-Match with the run's ETag."""
    run = locked_run(database, run_id)
    check_if_match(if_match, run_etag(run.version))
    asked = {name: getattr(body, name) for name in body.model_fields_set}
    changes = {name: value for name, value in asked.items() if getattr(run, name) != value}
    if changes:
        change_run(database, run, who.name, **changes)
        audit.record(database, who.name, "run.change", run_id, **changes)
    message = _detail(database, run_id)
    database.commit()
    response.headers["ETag"] = run_etag(message.version)
    return message


@router.delete("/{run_id}", status_code=204, openapi_extra=least("operator"))
def delete_whole_run(run_id: str, database: Database, who: Who, if_match: IfMatch = None) -> Response:
    """Delete a run at its end with its metrics, samples, checkpoints and files, for good; its folder goes within a
    minute. 409 while it has not ended, or when other runs started from its checkpoints: the answer names them."""
    check_if_match(if_match, run_etag(locked_run(database, run_id).version))
    run = delete_run(database, run_id, who.name)
    audit.record(database, who.name, "run.delete", run_id, name=run.name, state=run.state)
    database.commit()
    return Response(status_code=204)


@router.post("/{run_id}/stop", status_code=202, openapi_extra=least("operator"))
def stop_run(run_id: str, database: Database, who: Who) -> Command:
    """Stop with a checkpoint. While a stop is open, asking again returns the same command; 409 when the run is over."""
    return ask(database, run_id, "stop", who, STOP_DEADLINE_S)


@router.post("/{run_id}/kill", status_code=202, openapi_extra=least("operator"))
def kill_run(run_id: str, database: Database, who: Who) -> Command:
    """End the run's processes at once, without a checkpoint: for what a stop takes too long for. It becomes cancelled.

    Whatever else is open gives way. While a kill is open, asking again returns it; 409 when the run is over. A retry
    goes on from the newest checkpoint, or from the beginning without one.
    """
    return ask(database, run_id, "kill", who, KILL_DEADLINE_S)


@router.get("/{run_id}/commands/{command_id}", openapi_extra=least("viewer"))
def read_command(run_id: str, command_id: str, database: Database) -> Command:
    """What became of a command."""
    command = run_read.find_command(database, run_id, command_id)
    if command is None:
        raise not_found("command", command_id)
    return Command.model_validate(command)


def ask(database: Database, run_id: str, kind: str, who: Who, deadline_s: float) -> Command:
    """Ask something of a run for somebody; see `store.commands.request_command`."""
    command = request_command(database, run_id, kind, who.name, deadline_s)
    audit.record(database, who.name, f"run.{kind}", run_id, command=command.id)
    database.commit()
    return Command.model_validate(command)


def made_run(database: Database, run_id: str | None, response: Response) -> Run:
    """The run that a request made, now or before, with its address."""
    standing = run_read.run_standing(database, run_id) if run_id else None
    if standing is None:
        raise ProblemError(409, "run_deleted", "The run that this Idempotency-Key made is there no longer.")
    response.headers["Location"] = f"/v1/runs/{run_id}"
    return run_message(standing)


def run_message(standing: RunStanding) -> Run:
    """A run as it is sent."""
    return Run(**_fields(standing))


def _accept(body: SpecBody, database: Database, settings: Settings) -> Submission:
    rules = alert_rules.current_rules(database).alerts
    database.rollback()  # The spec's files are looked at without a transaction that waits.
    return accept_submission(body, rules, settings.roots, settings.reward_hosts, settings.engine_hosts)


def _dry_run(body: SpecBody, database: Database, settings: Settings) -> DryRun:
    spec, from_alert_rules = _accept(body, database, settings)
    found = estimate(spec)
    fields = spec_fields(spec)
    return DryRun(
        spec=fields,
        spec_yaml=spec_yaml(fields),
        warnings=[*found.warnings, *_fleet_warnings(database, spec.resources.gpus)],
        estimate=found.as_dict(),
        meaning=list(found.news),
        from_alert_rules=list(from_alert_rules),
    )


def _detail(database: Database, run_id: str) -> RunDetail:
    standing = run_read.run_standing(database, run_id)
    if standing is None:
        raise not_found("run", run_id)
    spec = run_read.active_spec(database, standing.run)
    return RunDetail(
        **_fields(standing),
        spec=spec,
        spec_yaml=spec_yaml(spec),
        open_commands=[Command.model_validate(command) for command in open_commands(database, run_id)],
    )


def _fleet_warnings(database: Database, gpus: int) -> list[str]:
    """That the run would wait for a machine that nobody has connected yet."""
    most = most_gpus(list_workers(database))
    if most is None or gpus <= most:
        return []
    return [
        f"resources.gpus is {gpus}, more than any worker that was ever connected has ({most}): the run would wait "
        "until a larger one is connected."
    ]


def _fields(standing: RunStanding) -> dict[str, Any]:
    run = standing.run
    derived = {"health", "reason_code", "reason_detail", "hint", "waiting_reason", "has_judge", "alerts", "latest"}
    return {
        **{name: getattr(run, name) for name in Run.model_fields.keys() - derived},
        "health": standing.health,
        "reason_code": standing.reason_code,
        "reason_detail": standing.reason_detail,
        "hint": standing.hint,
        "waiting_reason": standing.waiting_reason,
        "has_judge": bool((run.spec.get("gate") or {}).get("judge")),
        "alerts": AlertCounts.model_validate(standing.alerts),
        "latest": standing.latest,
    }
