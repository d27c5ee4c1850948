"""Workers: drained by request until enabled, whatever their processes do meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy.orm import Session

from store import workers
from store.fleet import list_workers, worker_standing
from store.models import Run, Worker
from store.queue import claim

GPUS = [{"name": "H", "memory_gib": 80.0}, {"name": None, "memory_gib": None}]


def register(session: Session, cpu_slots: int = 1, gpus: int = 0) -> None:
    workers.register(
        session, worker_id="w", host="h", pid=1, cpu_slots=cpu_slots, gpus=gpus, version="0", data_token="t",
        devices=GPUS[:gpus],
    )  # fmt: skip


def state(session: Session) -> str:
    return session.get_one(Worker, "w", populate_existing=True).state


def test_a_drained_worker_claims_nothing_until_it_is_enabled(session: Session, make_run: Callable[..., Run]) -> None:
    register(session)
    make_run()
    drained = workers.ask_drain(session, "w", "ada")
    assert (drained.state, drained.drain_asked_by) == ("draining", "ada")
    assert workers.heartbeat(session, "w") == "draining"
    assert claim(session, "w", 60) is None
    assert workers.ask_drain(session, "w", "bob").drain_asked_by == "ada", "who asked first"
    enabled = workers.enable(session, "w")
    assert (enabled.state, enabled.drain_asked_at) == ("active", None)
    assert claim(session, "w", 60) is not None


def test_it_stays_drained_when_its_process_starts_again_or_was_silent(session: Session) -> None:
    register(session)
    workers.ask_drain(session, "w", None)
    register(session)
    assert state(session) == "draining"
    workers.set_state(session, "w", "gone")
    assert workers.heartbeat(session, "w") == "draining"


def test_one_that_is_gone_is_drained_when_it_comes_back(session: Session) -> None:
    register(session)
    workers.set_state(session, "w", "gone")
    assert workers.ask_drain(session, "w", None).state == "gone"
    register(session)
    assert state(session) == "draining"
    assert workers.enable(session, "w").state == "active"


def test_a_worker_that_shuts_down_by_itself_cannot_be_enabled(session: Session) -> None:
    register(session)
    workers.set_state(session, "w", "draining")
    with pytest.raises(workers.WorkerLeaving, match="shutting down"):
        workers.enable(session, "w")
    register(session)
    assert state(session) == "active", "its next process takes runs"


def test_there_is_no_such_worker(session: Session) -> None:
    for ask in (lambda: workers.ask_drain(session, "nobody", None), lambda: workers.enable(session, "nobody")):
        with pytest.raises(workers.WorkerNotFound, match="nobody"):
            ask()


def test_slots_say_who_holds_them_and_what_they_are(session: Session, make_run: Callable[..., Run]) -> None:
    register(session, cpu_slots=1, gpus=2)
    run = make_run(name="holder", gpus=1)
    assert claim(session, "w", 60) is not None
    (standing,) = list_workers(session)
    seen = [(slot.kind, slot.index, slot.device, slot.memory_gib, slot.run_name) for slot in standing.slots]
    assert seen == [
        ("gpu", 0, "H", 80.0, "holder"),
        ("gpu", 1, None, None, None),
        ("cpu", 0, None, None, None),
    ]
    assert (standing.slots[0].run_id, standing.slots[0].run_state) == (run.id, "starting")
    assert (standing.busy_slots, standing.free("gpu"), standing.free("cpu")) == (1, 1, 1)
    assert 0 <= standing.silent_s < 60
    assert worker_standing(session, "nobody") is None
