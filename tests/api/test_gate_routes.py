"""The gates of a run over REST: as its journal told them, those that were left behind marked so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy.orm import Session, sessionmaker
from starlette.testclient import TestClient

from store.events import append_event

WINS = {"wins": 70, "ties": 8, "losses": 50, "rate": 0.578125, "low": 0.4915, "high": 0.6602}


def gate(tripped: bool = False, **wins: Any) -> dict[str, Any]:
    """What a trainer's journal has of a gate."""
    return {
        "against_last": {**WINS, **wins},
        "against_start": {**WINS, **wins},
        "rise": {"mean": 0.5, "standard_error": 0.1},
        "num_suspect": 0,
        "tripped": tripped,
        "explanation": "The gate has tripped." if tripped else "The gate is passed.",
    }


def test_gates_come_in_order_with_their_evidence(
    viewer: TestClient, make_run: Callable[..., str], sessions: sessionmaker[Session]
) -> None:
    run = make_run()
    assert viewer.get(f"/v1/runs/{run}/gates").json() == {"items": [], "next": None}
    asked = {"asked": 120, "swayed": 6, "unreadable": 1}
    with sessions.begin() as session:
        append_event(session, run, "gate", gate(), segment=1, iteration=50)
        append_event(session, run, "gate", gate(tripped=True, **asked), segment=1, iteration=100)
        append_event(session, run, "gate", {"tripped": "no gate at all"}, segment=1, iteration=150)
        append_event(session, run, "note", {"message": "no gate"}, segment=1, iteration=100)
    first, second = viewer.get(f"/v1/runs/{run}/gates").json()["items"]
    assert (first["segment"], first["iteration"], first["active"], first["tripped"]) == (1, 50, True, False)
    assert first["against_last"] == {**WINS, "asked": None, "swayed": None, "unreadable": None}
    assert first["rise"] == {"mean": 0.5, "standard_error": 0.1}
    assert (second["iteration"], second["tripped"], second["explanation"]) == (100, True, "The gate has tripped.")
    assert second["against_start"] == {**WINS, **asked}


def test_a_gate_that_was_told_twice_counts_once(
    viewer: TestClient, make_run: Callable[..., str], sessions: sessionmaker[Session]
) -> None:
    run = make_run()
    with sessions.begin() as session:
        append_event(session, run, "gate", gate(), segment=1, iteration=50)
        append_event(session, run, "gate", gate(tripped=True), segment=1, iteration=50)
    (only,) = viewer.get(f"/v1/runs/{run}/gates").json()["items"]
    assert only["tripped"] is True


def test_a_gate_of_another_segment_is_left_behind(
    viewer: TestClient,
    make_run: Callable[..., str],
    back_to: Callable[[str, int], None],
    sessions: sessionmaker[Session],
) -> None:
    """Segment 2 went on from iteration 60: the gate of 50 stays on the line, that of 100 does not."""
    run = make_run()
    with sessions.begin() as session:
        for iteration in (50, 100):
            append_event(session, run, "gate", gate(), segment=1, iteration=iteration)
    back_to(run, 60)
    with sessions.begin() as session:
        append_event(session, run, "gate", gate(), segment=2, iteration=100)
    told = viewer.get(f"/v1/runs/{run}/gates").json()["items"]
    assert [(each["segment"], each["iteration"], each["active"]) for each in told] == [
        (1, 50, True), (1, 100, False), (2, 100, True),
    ]  # fmt: skip


def test_no_such_run_is_404(viewer: TestClient) -> None:
    assert viewer.get("/v1/runs/r-none/gates").status_code == 404
