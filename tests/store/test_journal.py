"""Journal lines become rows once, in order, odd values included."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from ppo_core.errors import RunDirectoryError
from ppo_core.rundir import JournalWriter, SegmentDir, SegmentStart, create_segment, read_journal
from store import workers
from store.commands import mark_delivered, request_command
from store.journal import ingest, journal_position
from store.metrics_write import Bucket
from store.models import (
    Checkpoint,
    LatestMetric,
    MetricDef,
    MetricPoint,
    MetricRollup,
    Run,
    RunEvent,
    RunIteration,
    Sample,
)
from store.queue import claim
from store.runs import transition


class Attempt:
    """A claimed run with a journal to write and to deliver."""

    def __init__(self, session: Session, run: Run, folder: SegmentDir) -> None:
        self.session = session
        self.run = run
        self.folder = folder
        self.journal = JournalWriter(folder.journal)

    def write(self, type: Any, iteration: int = 0, **payload: Any) -> None:
        self.journal.append(type, iteration, payload)

    def metrics(self, iteration: int, values: dict[str, Any]) -> None:
        self.journal.append("metrics", iteration, values)

    def deliver(self, offset: int | None = None, token: int = 1) -> None:
        start = journal_position(self.session, self.run.id, 1)[1] if offset is None else offset
        events, end = read_journal(self.folder.journal, start)
        ingest(self.session, self.run.id, 1, events, end, token=token, folder=self.folder)

    def points(self, name: str) -> list[tuple[int, float | None]]:
        statement = (
            select(MetricPoint.iteration, MetricPoint.value)
            .join(MetricDef, MetricDef.id == MetricPoint.metric_id)
            .where(MetricPoint.run_id == self.run.id, MetricDef.name == name)
            .order_by(MetricPoint.iteration)
        )
        return [(iteration, value) for iteration, value in self.session.execute(statement)]

    def events(self, type: str) -> list[dict[str, Any]]:
        statement = select(RunEvent.payload).where(RunEvent.run_id == self.run.id, RunEvent.type == type)
        return list(self.session.scalars(statement.order_by(RunEvent.seq)))


@pytest.fixture
def attempt(session: Session, make_run: Callable[..., Run], tmp_path: Path) -> Attempt:
    run = make_run()
    workers.register(session, worker_id="w", host="h", pid=1, cpu_slots=1, gpus=0, version="0", data_token="t")
    assert claim(session, "w", 20) is not None
    return Attempt(session, run, create_segment(tmp_path / run.id, SegmentStart(run.id, 1, {"seed": 1})))


def test_started_makes_the_run_running(attempt: Attempt) -> None:
    attempt.write("phase", phase="loading", deadline_s=30.0)
    attempt.deliver()
    assert (attempt.run.state, attempt.events("phase")) == ("starting", [])
    attempt.session.refresh(attempt.run)
    assert attempt.run.phase == "loading"
    assert attempt.run.progress_deadline_at is not None
    attempt.write("started", pid=1, attempt=1, token=1)
    attempt.deliver()
    assert attempt.run.state == "running"
    assert attempt.events("started")[0]["pid"] == 1


def test_delivering_twice_changes_nothing(attempt: Attempt) -> None:
    attempt.write("started", pid=1)
    for iteration in range(5):
        attempt.metrics(iteration, {"a": float(iteration), "b": None})
    attempt.deliver()

    def everything() -> list[Any]:
        session = attempt.session
        return [
            session.execute(select(*table.__table__.columns).where(table.run_id == attempt.run.id)).all()
            for table in (MetricPoint, MetricRollup, LatestMetric, RunIteration, RunEvent)
        ]

    before = everything()
    attempt.deliver(offset=0)
    assert everything() == before
    assert len(before[0]) == 10


def test_missing_line_is_noticed(attempt: Attempt) -> None:
    for iteration in range(3):
        attempt.metrics(iteration, {"a": 1.0})
    events, end = read_journal(attempt.folder.journal)
    with pytest.raises(RunDirectoryError, match="from line 0 to line 2"):
        ingest(attempt.session, attempt.run.id, 1, events[1:], end, token=1, folder=attempt.folder)


def test_torn_last_line_waits_for_its_end(attempt: Attempt) -> None:
    attempt.metrics(1, {"a": 1.0})
    whole = attempt.folder.journal.read_bytes()
    attempt.metrics(2, {"a": 2.0})
    complete = attempt.folder.journal.read_bytes()
    attempt.folder.journal.write_bytes(complete[: len(whole) + 20])
    attempt.deliver()
    assert attempt.points("a") == [(1, 1.0)]
    attempt.folder.journal.write_bytes(complete)
    attempt.deliver()
    assert attempt.points("a") == [(1, 1.0), (2, 2.0)]


def test_odd_numbers_keep_their_values(attempt: Attempt) -> None:
    odd = [math.nan, math.inf, -math.inf, -0.0, 1e308, 5e-324, None]
    for iteration, value in enumerate(odd, start=1):
        attempt.metrics(iteration, {"odd": value})
    attempt.deliver()
    stored = [value for _, value in attempt.points("odd")]
    assert [repr(value) for value in stored] == [repr(value) for value in odd]
    assert attempt.events("metrics")[0] == {"odd": None, "nonfinite": {"odd": "NaN"}}
    assert attempt.events("metrics")[6] == {"odd": None}
    rollup = attempt.session.scalars(
        select(MetricRollup).where(MetricRollup.run_id == attempt.run.id, MetricRollup.size == 64)
    ).one()
    assert (rollup.nonfinite, rollup.n, rollup.min, rollup.max) == (3, 3, -0.0, 1e308)


def test_sum_beyond_float64_is_no_error(attempt: Attempt) -> None:
    for iteration in range(3):
        attempt.metrics(iteration, {"huge": 1.5e308})
        attempt.deliver()
    assert len(attempt.points("huge")) == 3


def test_rollups_are_the_same_in_one_delivery_and_in_many(attempt: Attempt) -> None:
    values = [math.sin(iteration) for iteration in range(150)]
    for iteration, value in enumerate(values):
        attempt.metrics(iteration, {"one": value})
        if iteration % 7 == 0:
            attempt.deliver()
    attempt.deliver()
    expected = []
    for bucket in range(3):
        whole = Bucket()
        for iteration in range(bucket * 64, min((bucket + 1) * 64, 150)):
            whole.add(iteration, values[iteration])
        expected.append(whole)
    stored = attempt.session.scalars(
        select(MetricRollup)
        .where(MetricRollup.run_id == attempt.run.id, MetricRollup.size == 64)
        .order_by(MetricRollup.bucket)
    )
    columns = Bucket.__dataclass_fields__
    assert [Bucket(**{name: getattr(row, name) for name in columns}) for row in stored] == expected
    assert expected[2].first_iteration == 128
    assert expected[2].last == values[149]


def test_tokens_of_iterations_add_up(attempt: Attempt) -> None:
    for iteration, tokens in ((1, 100.0), (2, 50.0)):
        attempt.metrics(iteration, {"data/response_tokens": tokens})
    attempt.deliver()
    attempt.metrics(3, {"data/response_tokens": 7.0})
    attempt.deliver()
    rows = attempt.session.execute(
        select(RunIteration.iteration, RunIteration.tokens)
        .where(RunIteration.run_id == attempt.run.id)
        .order_by(RunIteration.iteration)
    )
    assert [tuple(row) for row in rows] == [(1, 100), (2, 150), (3, 157)]
    attempt.session.refresh(attempt.run)
    assert attempt.run.iteration == 3


def test_bad_metric_is_refused_alone(attempt: Attempt) -> None:
    attempt.metrics(1, {"good": 1.0, "x" * 10_000: 2.0, "text": "3", "flag": True, "line\nbreak": 1.0})
    attempt.deliver()
    assert attempt.points("good") == [(1, 1.0)]
    notes = [note["message"] for note in attempt.events("note")]
    assert len(notes) == 4
    assert "10000 characters" in notes[0]
    assert attempt.events("metrics") == [{"good": 1.0}]


@pytest.mark.parametrize(
    ("type", "payload"),
    [
        ("phase", {"phase": "roll\0out", "deadline_s": 5}),
        ("phase", {"phase": {"is": "no text"}}),
        ("phase", {"phase": "rollout", "deadline_s": -1e300}),
        ("ack", {"command": "c-\0", "status": "accepted"}),
        ("checkpoint", {"path": "p", "bytes": 2**80, "manifest_sha256": "m", "reason": "schedule"}),
        ("checkpoint", {"path": "p", "bytes": 1, "manifest_sha256": None, "reason": "schedule"}),
    ],
)
def test_a_line_that_the_database_refuses_is_lost_alone(attempt: Attempt, type: str, payload: dict[str, Any]) -> None:
    attempt.write("started", pid=1)
    attempt.metrics(1, {"a": 1.0})
    attempt.write(type, 1, **payload)
    attempt.metrics(2, {"a": 2.0})
    attempt.deliver()
    attempt.deliver()
    assert attempt.points("a") == [(1, 1.0), (2, 2.0)]
    (note,) = attempt.events("note")
    assert note["message"].startswith(f"journal line 3 ({type}) is refused: ")
    assert attempt.run.state == "running"
    assert [len(attempt.events(each)) for each in ("started", "metrics")] == [1, 2]
    assert journal_position(attempt.session, attempt.run.id, 1)[0] == 4


def test_latest_value_is_of_the_newest_iteration_that_had_one(attempt: Attempt) -> None:
    attempt.metrics(1, {"always": 1.0, "seldom": 5.0})
    attempt.metrics(2, {"always": 2.0})
    attempt.deliver()
    rows = attempt.session.execute(
        select(MetricDef.name, LatestMetric.iteration, LatestMetric.value)
        .join(MetricDef, MetricDef.id == LatestMetric.metric_id)
        .where(LatestMetric.run_id == attempt.run.id)
        .order_by(MetricDef.name)
    )
    assert [tuple(row) for row in rows] == [("always", 2, 2.0), ("seldom", 1, 5.0)]


def _sample(**fields: Any) -> dict[str, Any]:
    tokens = {"ids": [1, 2], "texts": ["a", "\0"], "logprobs": [-0.5, float("nan")]}
    sample = {
        "kind": "train",
        "index": 0,
        "prompt": "p",
        "response": "a\0\ud800",
        "score": 0.5,
        "penalized_score": None,
        "judge_score": 0.25,
    }
    return {**sample, "length": 2, "finish_reason": "stop", "tokens": tokens, **fields}


def test_samples_file_becomes_rows_with_odd_text_by_the_rule(attempt: Attempt) -> None:
    lines = [json.dumps(_sample(index=index)) for index in range(3)]
    (attempt.folder.samples / "iter-000001.jsonl").write_text("\n".join(lines) + "\n")
    attempt.write("samples", 1, path="samples/iter-000001.jsonl", num=3)
    attempt.deliver()
    rows = list(attempt.session.scalars(select(Sample).where(Sample.run_id == attempt.run.id)))
    assert len(rows) == 3
    assert rows[0].response == "a\u2400\ufffd"
    assert rows[0].tokens["logprobs"] == [-0.5, None]
    assert rows[0].tokens["texts"] == ["a", "\u2400"]
    assert (rows[0].tokens["judge_score"], rows[0].tokens["judge_against_last"]) == (0.25, None)
    assert attempt.events("samples") == [{"iteration": 1, "num": 3}]


@pytest.mark.parametrize("path", ["samples/none.jsonl", "../../elsewhere.jsonl", "spec.json"])
def test_samples_that_cannot_be_had_are_a_note(attempt: Attempt, path: str) -> None:
    attempt.write("samples", 1, path=path, num=3)
    attempt.metrics(1, {"a": 1.0})
    attempt.deliver()
    assert "samples are not shown" in attempt.events("note")[0]["message"]
    assert attempt.points("a") == [(1, 1.0)]


def _checkpoint(attempt: Attempt, iteration: int) -> None:
    path = f"checkpoints/iter-{iteration:06d}"
    attempt.write(
        "checkpoint", iteration, path=path, bytes=10, manifest_sha256="ab", reason="schedule", judge_score=0.5
    )


def test_checkpoint_row_names_its_path_in_the_run(attempt: Attempt) -> None:
    _checkpoint(attempt, 20)
    attempt.deliver()
    row = attempt.session.scalars(select(Checkpoint).where(Checkpoint.run_id == attempt.run.id)).one()
    assert (row.path, row.iteration, row.lease_token) == ("segment-0001/checkpoints/iter-000020", 20, 1)
    assert attempt.events("checkpoint")[0]["id"] == row.id


def test_of_the_active_segment_only_the_holder_delivers(attempt: Attempt) -> None:
    """What a lost holder took from a journal that the next attempt writes would be stored and not count."""
    transition(attempt.session, attempt.run.id, "recovering")
    transition(attempt.session, attempt.run.id, "queued")
    assert claim(attempt.session, "w", 20) is not None
    attempt.write("started", pid=1)
    attempt.metrics(1, {"a": 1.0})
    _checkpoint(attempt, 1)
    attempt.deliver(token=1)
    assert attempt.points("a") == []
    assert attempt.run.state == "starting"
    attempt.deliver(token=2)
    assert attempt.points("a") == [(1, 1.0)]
    assert (attempt.run.state, attempt.run.iteration) == ("running", 1)
    assert attempt.session.scalar(select(func.count()).where(Checkpoint.run_id == attempt.run.id)) == 1


def test_acks_move_the_command(attempt: Attempt) -> None:
    attempt.write("started", pid=1)
    attempt.deliver()
    session, run_id = attempt.session, attempt.run.id
    checkpoint = request_command(session, run_id, "checkpoint", None, 60)
    stop = request_command(session, run_id, "stop", None, 60)
    for command in (checkpoint, stop):
        mark_delivered(session, command.id)
        attempt.write("ack", 1, command=command.id, kind=command.kind, status="accepted", detail=None)
        attempt.write("ack", 1, command=command.id, kind=command.kind, status="done", detail=None)
    attempt.write("ack", 1, command="c-of-nobody", kind="stop", status="done", detail=None)
    attempt.deliver()
    assert (checkpoint.status, stop.status) == ("done", "acked")  # a stop is done when the processes are gone


def test_line_that_breaks_the_contract_is_a_note(attempt: Attempt) -> None:
    attempt.write("checkpoint", 1, path="checkpoints/iter-000001")
    attempt.metrics(1, {"a": 1.0})
    attempt.deliver()
    assert "journal line 1 (checkpoint) is refused" in attempt.events("note")[0]["message"]
    assert attempt.points("a") == [(1, 1.0)]
