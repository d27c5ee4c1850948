"""Why a queued run waits: the truth in one sentence, for a whole list at the price of one run."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import event, update
from sqlalchemy.orm import Session

from store import workers
from store.models import Run
from store.queue import claim
from store.run_read import list_runs
from store.waiting import waiting_reasons

MakeRun = Callable[..., Run]


@pytest.fixture
def add(session: Session) -> Callable[..., str]:
    def register(worker_id: str, cpu_slots: int = 0, gpus: int = 0) -> str:
        workers.register(
            session, worker_id=worker_id, host="h", pid=1, cpu_slots=cpu_slots, gpus=gpus, version="0", data_token="t"
        )
        return worker_id

    return register


@pytest.fixture
def queue(session: Session, make_run: MakeRun) -> MakeRun:
    """`make_run`, each a second later than the one before: all of one transaction have one time else."""
    start = datetime.now(UTC) - timedelta(hours=1)
    number = 0

    def make(**fields: object) -> Run:
        nonlocal number
        number += 1
        run = make_run(**fields)
        run.queued_at = start + timedelta(seconds=number)
        session.flush()
        return run

    return make


def reason(session: Session, run: Run) -> str:
    return waiting_reasons(session, [run], datetime.now(UTC))[run.id]


def test_without_a_worker(session: Session, make_run: MakeRun, add: Callable[..., str]) -> None:
    run = make_run()
    assert reason(session, run) == "No worker is connected."
    workers.set_state(session, add("w", cpu_slots=1), "gone")
    assert reason(session, run) == "No worker is connected."


def test_with_drained_workers(session: Session, make_run: MakeRun, add: Callable[..., str]) -> None:
    run, big = make_run(), make_run(gpus=2)
    workers.ask_drain(session, add("a", cpu_slots=1), "ada")
    assert reason(session, run) == "Worker a is draining."
    workers.ask_drain(session, add("b", cpu_slots=1, gpus=4), "ada")
    assert reason(session, run) == "Every connected worker is draining: a, b."
    add("c", gpus=1)
    assert reason(session, run) == "Needs a CPU slot; workers that have one are draining: a, b."
    assert reason(session, big) == "Needs 2 GPUs; workers that have them are draining: b."


def test_with_a_worker_that_sees_another_data_folder(
    session: Session, make_run: MakeRun, add: Callable[..., str]
) -> None:
    run, big = make_run(), make_run(gpus=2)
    workers.heartbeat(session, add("a", cpu_slots=1, gpus=2), "It is another one.")
    assert reason(session, run) == "Worker a takes no run: It is another one."
    add("b", cpu_slots=1)
    assert reason(session, run).startswith("Next in the queue; a worker has room")
    assert reason(session, big) == "Worker a, which has room for it, takes no run: It is another one."


def test_that_no_worker_could_take(session: Session, make_run: MakeRun, add: Callable[..., str]) -> None:
    add("w", gpus=2)
    assert reason(session, make_run()) == "No connected worker takes CPU runs."
    assert reason(session, make_run(gpus=8)) == (
        "Needs 8 GPUs; the largest worker that was ever connected has 2: connect a larger one, or submit it again with "
        "fewer."
    )


def test_until_it_is_tried_again(session: Session, make_run: MakeRun, add: Callable[..., str]) -> None:
    add("w", cpu_slots=1)
    run = make_run()
    later = datetime.now(UTC) + timedelta(seconds=15)
    session.execute(update(Run).where(Run.id == run.id).values(not_before=later))
    session.refresh(run)
    assert reason(session, run) in [f"Waits {seconds} s more before it is tried again." for seconds in (14, 15, 16)]


def test_for_room_and_for_those_before_it(session: Session, queue: MakeRun, add: Callable[..., str]) -> None:
    """Only runs that want the same kind of slot are before it; the names are of those who hold what it wants."""
    add("w", cpu_slots=2, gpus=2)
    first = queue(name="first")
    assert reason(session, first) == "Next in the queue; a worker has room and takes it within seconds."
    queue(name="second")
    assert claim(session, "w", 60) is not None
    assert claim(session, "w", 60) is not None
    low, high, pair = queue(name="low"), queue(name="high", priority=5), queue(name="pair", gpus=2)
    assert reason(session, high) == "Next in the queue; CPU slots are held by first, second."
    assert reason(session, low) == "1 in the queue before it; CPU slots are held by first, second."
    single = queue(name="single", gpus=1, priority=9)
    assert claim(session, "w", 60) is not None
    session.refresh(single)
    assert single.state == "starting"
    wanted = "Next in the queue; needs 2 GPUs on one worker, free are 1; others are held by single."
    assert reason(session, pair) == wanted


def test_behind_a_bigger_run_that_free_gpus_are_held_for(
    session: Session, queue: MakeRun, add: Callable[..., str]
) -> None:
    """It says what the claim does: the small one is not taken, though a GPU is free."""
    add("w", gpus=2)
    queue(name="holder", gpus=1)
    assert claim(session, "w", 60) is not None
    queue(name="big", gpus=2)
    small = queue(name="small", gpus=1)
    assert claim(session, "w", 60) is None
    wanted = "1 in the queue before it; free GPUs are held for big, which needs 2 GPUs and has waited long."
    assert reason(session, small) == wanted
    urgent = queue(name="urgent", gpus=1, priority=5)
    assert reason(session, urgent) == "Next in the queue; a worker has room and takes it within seconds."
    assert claim(session, "w", 60) is not None


def test_a_long_list_costs_as_many_queries_as_a_short_one(
    session: Session, queue: MakeRun, add: Callable[..., str]
) -> None:
    add("w", cpu_slots=3)
    runs = [queue(name=f"run {number:02d}") for number in range(60)]
    for _ in range(3):
        assert claim(session, "w", 60) is not None
    told: list[str] = []
    connection = session.connection()
    listen = lambda *arguments: told.append(arguments[2])  # noqa: E731
    event.listen(connection, "before_cursor_execute", listen)
    try:
        one = [standing.waiting_reason for standing in list_runs(session, states=["queued"], limit=1)]
        for_one = len(told)
        told.clear()
        many = {standing.run.name: standing.waiting_reason for standing in list_runs(session, limit=100)}
    finally:
        event.remove(connection, "before_cursor_execute", listen)
    assert len(told) == for_one <= 7
    holders = "run 00, run 01, run 02"
    assert one[0] in many.values()
    assert many["run 59"] == f"56 in the queue before it; CPU slots are held by {holders}."
    assert many["run 03"] == f"Next in the queue; CPU slots are held by {holders}."
    assert all(many[run.name] for run in runs[3:])
