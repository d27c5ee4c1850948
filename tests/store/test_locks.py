"""Who changes the same rows at the same moment waits, and neither fails nor makes the other fail."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime

import pytest
from sqlalchemy import select, text
from sqlalchemy.orm import Session, sessionmaker

from store.alert_tables import Alert
from store.alerts import acknowledge, locked_alert, take_news
from store.events import append_event
from store.runs import create_run, locked_run, transition
from store.session import make_engine, session_factory
from store.webhook_tables import WebhookDelivery
from store.webhooks import create_webhook, delete_webhook, locked_webhook
from tests.alert_news import news

PATIENCE_S = 30.0
RUN = "r-1"


@pytest.fixture
def sessions(database_url: str) -> Iterator[sessionmaker[Session]]:
    """Of a database with one queued run."""
    engine = make_engine(database_url)
    found = session_factory(engine)
    with found.begin() as session:
        create_run(
            session, run_id=RUN, name="test", spec={}, num_iterations=5, priority=0, gpus=0, created_by=None
        )  # fmt: skip
    yield found
    engine.dispose()


def wait_until_waiting(sessions: sessionmaker[Session], work: Future[None]) -> None:
    """Until a session of the database waits for a lock that another holds."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    until = time.monotonic() + PATIENCE_S
    while not work.done() and time.monotonic() < until:
        with sessions() as session:
            if session.scalar(text(waiting)):
                return
        time.sleep(0.02)
    raise AssertionError(f"nobody waits: {work}")


def test_an_alert_may_be_acknowledged_while_news_of_it_comes(sessions: sessionmaker[Session]) -> None:
    """Both want the run's row and the alert's; in two orders they would wait for each other."""
    with sessions.begin() as session:
        alert_id = take_news(session, locked_run(session, RUN), 1, 8, datetime.now(UTC), news()).id

    def acknowledge_it() -> None:
        with sessions.begin() as session:
            alert = locked_alert(session, alert_id)
            assert alert is not None
            acknowledge(session, alert, "ada")

    with ThreadPoolExecutor(1) as pool, sessions() as session:
        run = locked_run(session, RUN)
        person = pool.submit(acknowledge_it)
        wait_until_waiting(sessions, person)
        take_news(session, run, 1, 9, datetime.now(UTC), news(status="escalated", severity="critical"))
        append_event(session, RUN, "note", {}, segment=1)
        session.commit()
        person.result(PATIENCE_S)
    with sessions() as session:
        alert = session.scalars(select(Alert)).one()
        assert (alert.severity, alert.acknowledged_by) == ("critical", "ada")


def test_a_webhook_that_is_deleted_fails_nothing_of_what_it_would_have_been_told(
    sessions: sessionmaker[Session],
) -> None:
    with sessions.begin() as session:
        webhook_id = create_webhook(
            session, name="here", url="https://hooks.example/", events=["run.state"], created_by=None
        ).id

    def stop_run() -> None:
        with sessions.begin() as session:
            transition(session, RUN, "stopped")

    with ThreadPoolExecutor(1) as pool, sessions() as session:
        webhook = locked_webhook(session, webhook_id)
        assert webhook is not None
        delete_webhook(session, webhook)
        run = pool.submit(stop_run)
        wait_until_waiting(sessions, run)
        session.commit()
        run.result(PATIENCE_S)
    with sessions() as session:
        assert locked_run(session, RUN).state == "stopped"
        assert session.scalars(select(WebhookDelivery)).all() == []
