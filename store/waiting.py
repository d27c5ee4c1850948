"""Why queued runs wait: derived from the queue, the workers and who holds their slots, for many runs at once.

It says what the claim of `store.queue` would find, in the order in which things have to change: the run itself, the
workers, the queue, the slots. Nothing here writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from sqlalchemy import func, select
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.orm import Session

from store.fleet import WorkerStanding, list_workers, most_gpus
from store.models import Run
from store.queue import ELIGIBLE, ORDER, RESERVE_AFTER_S

MOST_NAMED = 3


def waiting_reasons(session: Session, queued: Sequence[Run], now: datetime) -> dict[str, str]:
    """A sentence for each of these queued runs, by id. Four queries, however many runs there are."""
    if not queued:
        return {}
    workers = list_workers(session)
    ahead = _num_ahead(session, [run.id for run in queued])
    held = _held_back(session, workers)
    reasons = {}
    for run in queued:
        num_ahead = ahead.get(run.id, 0)
        never = _too_big(run, workers)
        reasons[run.id] = (
            _not_before(run, now) or never or _no_place(run, workers) or _its_turn(run, workers, num_ahead, held)
        )
    return reasons


def _num_ahead(session: Session, run_ids: Sequence[str]) -> dict[str, int]:
    """How many runs a worker with room would take before each: those of its kind, GPU or CPU, in the queue's order."""
    place = func.row_number().over(partition_by=Run.gpus > 0, order_by=ORDER)
    places = select(Run.id, place.label("place")).where(*ELIGIBLE).subquery()
    rows = session.execute(select(places.c.id, places.c.place).where(places.c.id.in_(run_ids)))
    return {run_id: number - 1 for run_id, number in rows}


def _held_back(session: Session, workers: Sequence[WorkerStanding]) -> dict[str, Run]:
    """By worker: the run of several GPUs that its free ones are held for, as `store.queue` does by default."""
    waited = func.now() - timedelta(seconds=RESERVE_AFTER_S)
    # Of those that want the same number of GPUs only the first can be the one: in a long queue these are few.
    statement = (
        select(Run)
        .where(*ELIGIBLE, Run.gpus > 1, Run.queued_at <= waited)
        .ext(distinct_on(Run.gpus))
        .order_by(Run.gpus, *ORDER)
    )
    big = sorted(session.scalars(statement), key=_place)
    active = [standing for standing in workers if standing.takes_runs]
    held = {}
    for standing in active:
        first = next((run for run in big if standing.free("gpu") < run.gpus <= standing.worker.gpus), None)
        if first is not None:
            able = [other for other in active if other.worker.gpus >= first.gpus]
            if min(able, key=lambda other: (-other.free("gpu"), other.worker.id)) is standing:
                held[standing.worker.id] = first
    return held


def _place(run: Run) -> tuple[int, datetime, str]:
    return -run.priority, run.queued_at, run.id


def _not_before(run: Run, now: datetime) -> str | None:
    if run.not_before is None or run.not_before <= now:
        return None
    return f"Waits {round((run.not_before - now).total_seconds()) + 1} s more before it is tried again."


def _too_big(run: Run, workers: Sequence[WorkerStanding]) -> str | None:
    """Why waiting alone will not do: no machine that anybody ever connected has room for it."""
    most = most_gpus(workers)
    if most is None or run.gpus <= most:
        return None
    return (
        f"Needs {_gpus(run.gpus)}; the largest worker that was ever connected has {most}: connect a larger one, or "
        "submit it again with fewer."
    )


def _no_place(run: Run, workers: Sequence[WorkerStanding]) -> str | None:
    """Why no worker would take it, were it the only run there is."""
    active = [standing for standing in workers if standing.takes_runs]
    draining = [standing for standing in workers if standing.worker.state == "draining"]
    refused = [standing for standing in workers if standing.worker.state == "active" and not standing.takes_runs]
    if not active and refused:
        first = refused[0].worker
        return f"Worker {first.id} takes no run: {first.folder_fault}"
    if not active and not draining:
        return "No worker is connected."
    if not active:
        names = _names(standing.worker.id for standing in draining)
        return f"Every connected worker is draining: {names}." if len(draining) > 1 else f"Worker {names} is draining."
    if any(_capacity(standing, run) for standing in active):
        return None
    if (kept := next((standing.worker for standing in refused if _capacity(standing, run)), None)) is not None:
        return f"Worker {kept.id}, which has room for it, takes no run: {kept.folder_fault}"
    if could := [standing.worker.id for standing in draining if _capacity(standing, run)]:
        what, such = ("a CPU slot", "one") if run.gpus == 0 else (_gpus(run.gpus), "them")
        return f"Needs {what}; workers that have {such} are draining: {_names(could)}."
    if not run.gpus:
        return "No connected worker takes CPU runs."
    most = max(standing.worker.gpus for standing in active)
    return f"Needs {_gpus(run.gpus)}; the largest connected worker has {most}."


def _its_turn(run: Run, workers: Sequence[WorkerStanding], num_ahead: int, held: Mapping[str, Run]) -> str:
    able = [standing for standing in workers if standing.takes_runs and _capacity(standing, run)]
    kind, needed = ("gpu", run.gpus) if run.gpus else ("cpu", 1)
    queue = "Next in the queue" if num_ahead == 0 else f"{num_ahead} in the queue before it"
    room = [standing.worker.id for standing in able if standing.free(kind) >= needed]
    first = next((held[worker] for worker in room if worker in held and run.gpus), None)
    if first is not None and _place(first) < _place(run) and all(worker in held for worker in room):
        return f"{queue}; free GPUs are held for {first.name}, which needs {_gpus(first.gpus)} and has waited long."
    if room:
        return f"{queue}; a worker has room and takes it within seconds." if num_ahead == 0 else f"{queue}."
    holders = _names(
        dict.fromkeys(
            slot.run_name or "a run that is gone"
            for standing in able
            for slot in standing.slots
            if slot.kind == kind and slot.run_id is not None
        )
    )
    if kind == "cpu":
        return f"{queue}; CPU slots are held by {holders}."
    most = max(standing.free(kind) for standing in able)
    return f"{queue}; needs {_gpus(needed)} on one worker, free are {most}; others are held by {holders}."


def _capacity(standing: WorkerStanding, run: Run) -> bool:
    return standing.worker.gpus >= run.gpus if run.gpus else standing.worker.cpu_slots > 0


def _gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"


def _names(names: Iterable[str]) -> str:
    """The first few, and how many more."""
    found = list(names)
    shown = ", ".join(found[:MOST_NAMED])
    return shown if len(found) <= MOST_NAMED else f"{shown} and {len(found) - MOST_NAMED} more"
