"""Who gets which run: priority, age, fit; never twice."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from store import workers
from store.ids import new_id
from store.models import Run, WorkerSlot
from store.queue import claim, held_gpus
from store.runs import create_run, transition
from store.session import make_engine, session_factory


def _register(session: Session, worker_id: str = "w", cpu_slots: int = 1, gpus: int = 0) -> str:
    workers.register(
        session, worker_id=worker_id, host="here", pid=1, cpu_slots=cpu_slots, gpus=gpus, version="0", data_token="t"
    )
    return worker_id


@pytest.fixture
def empty_queue(session: Session) -> None:
    assert session.scalar(select(func.count()).select_from(Run).where(Run.state == "queued")) == 0


pytestmark = pytest.mark.usefixtures("empty_queue")


def test_claim_takes_run_slot_and_lease_together(session: Session, make_run: Callable[..., Run]) -> None:
    run, worker = make_run(), _register(session)
    claimed = claim(session, worker, 20)
    assert claimed is not None
    assert (claimed.run_id, claimed.token, claimed.attempt, claimed.gpus) == (run.id, 1, 1, ())
    assert (run.state, run.lease_worker, run.lease_token, run.attempt) == ("starting", worker, 1, 1)
    assert run.lease_expires_at is not None
    assert session.scalars(select(WorkerSlot.run_id)).all() == [run.id]


def test_priority_goes_before_age(session: Session, make_run: Callable[..., Run]) -> None:
    older, younger, urgent = make_run(), make_run(), make_run(priority=5)
    for age, run in ((3, older), (2, younger), (1, urgent)):
        session.execute(update(Run).where(Run.id == run.id).values(queued_at=func.now() - timedelta(hours=age)))
    worker = _register(session, cpu_slots=3)
    order = [claim(session, worker, 20) for _ in range(3)]
    assert [claimed and claimed.run_id for claimed in order] == [urgent.id, older.id, younger.id]


def test_full_worker_claims_nothing(session: Session, make_run: Callable[..., Run]) -> None:
    make_run(), make_run()
    worker = _register(session)
    assert claim(session, worker, 20) is not None
    assert claim(session, worker, 20) is None


def test_run_that_waits_for_a_later_time_is_left(session: Session, make_run: Callable[..., Run]) -> None:
    run, worker = make_run(), _register(session)
    session.execute(update(Run).where(Run.id == run.id).values(not_before=func.now() + timedelta(seconds=60)))
    assert claim(session, worker, 20) is None


def test_gpus_belong_to_one_run_and_fit_is_respected(session: Session, make_run: Callable[..., Run]) -> None:
    worker = _register(session, cpu_slots=1, gpus=3)
    pair, too_big, single = make_run(gpus=2, priority=2), make_run(gpus=4, priority=3), make_run(gpus=1)
    taken = {claimed.run_id: claimed.gpus for _ in range(3) if (claimed := claim(session, worker, 20))}
    assert taken == {pair.id: (0, 1), single.id: (2,)}
    assert held_gpus(session, pair.id) == (0, 1)
    assert too_big.state == "queued"


def _aged(session: Session, run: Run, seconds: float) -> None:
    session.execute(update(Run).where(Run.id == run.id).values(queued_at=func.now() - timedelta(seconds=seconds)))


def test_big_run_is_overtaken_until_it_has_waited_and_then_gpus_are_held_for_it(
    session: Session, make_run: Callable[..., Run]
) -> None:
    worker = _register(session, cpu_slots=1, gpus=2)
    running = make_run(gpus=1)
    assert claim(session, worker, 20) is not None
    big, small = make_run(gpus=2), make_run(gpus=1)
    _aged(session, big, 599)
    overtaking = claim(session, worker, 20)
    assert overtaking is not None
    assert overtaking.run_id == small.id
    _end(session, small)
    _aged(session, big, 601)
    later, on_cpu = make_run(gpus=1), make_run()
    assert [held and held.run_id for held in (claim(session, worker, 20), claim(session, worker, 20))] == [
        on_cpu.id,  # CPU slots are nobody's reserve
        None,
    ]
    _end(session, running)
    room = claim(session, worker, 20)
    assert room is not None
    assert (room.run_id, room.gpus, later.state) == (big.id, (0, 1), "queued")


def test_gpus_are_held_on_one_worker_and_not_for_what_no_worker_could_hold(
    session: Session, make_run: Callable[..., Run]
) -> None:
    for worker in ("a", "b"):
        _register(session, worker, cpu_slots=0, gpus=2)
        make_run(gpus=1)
        assert claim(session, worker, 20) is not None
    big, too_big, small, urgent = make_run(gpus=2), make_run(gpus=3), make_run(gpus=1), make_run(gpus=1, priority=1)
    _aged(session, big, 700)
    _aged(session, too_big, 800)
    ahead = claim(session, "a", 20)
    assert ahead is not None
    assert ahead.run_id == urgent.id  # what stands before it in the queue still goes first
    assert claim(session, "b", 20) is None  # b has more room by now, so it is b that waits
    _end(session, urgent)
    beside = claim(session, "b", 20) or claim(session, "a", 20)
    assert beside is not None
    assert beside.run_id == small.id  # one of two equals gives its GPU all the same


def _end(session: Session, run: Run) -> None:
    transition(session, run.id, "failed")


def test_draining_worker_claims_nothing(session: Session, make_run: Callable[..., Run]) -> None:
    make_run()
    worker = _register(session)
    workers.set_state(session, worker, "draining")
    assert claim(session, worker, 20) is None
    assert claim(session, "unknown", 20) is None


def test_slot_is_free_once_the_run_has_ended(session: Session, make_run: Callable[..., Run]) -> None:
    run, worker = make_run(), _register(session)
    claim(session, worker, 20)
    transition(session, run.id, "recovering")
    assert session.scalars(select(WorkerSlot.run_id)).all() == [run.id]  # its processes may still be there
    transition(session, run.id, "failed")
    assert session.scalars(select(WorkerSlot.run_id)).all() == [None]
    assert (run.lease_worker, run.lease_expires_at) == (None, None)


def test_many_at_once_never_take_one_run_twice(database_url: str) -> None:
    """Four workers with two slots each, claiming from two connections each, and six runs."""
    engine = make_engine(database_url, pool_size=10)
    sessions = session_factory(engine)
    with sessions.begin() as session:
        for worker in "abcd":
            _register(session, worker, cpu_slots=2)
        fields: dict[str, Any] = {
            "name": "n",
            "spec": {},
            "num_iterations": 1,
            "priority": 0,
            "gpus": 0,
            "created_by": None,
        }
        runs = {create_run(session, run_id=new_id("r"), **fields).id for _ in range(6)}

    def claim_one(worker: str) -> str | None:
        with sessions.begin() as session:
            claimed = claim(session, worker, 20)
            return claimed.run_id if claimed else None

    with ThreadPoolExecutor(8) as pool:
        taken = [run for run in pool.map(claim_one, "aabbccdd") if run]
    while (late := claim_one("a") or claim_one("b") or claim_one("c") or claim_one("d")) is not None:
        taken.append(late)
    assert sorted(taken) == sorted(runs)
    with sessions() as session:
        assert session.scalars(select(Run.lease_token)).all() == [1] * 6
        held = session.scalars(select(WorkerSlot.run_id).where(WorkerSlot.run_id.is_not(None))).all()
        assert sorted(run for run in held if run) == sorted(runs)
    engine.dispose()
