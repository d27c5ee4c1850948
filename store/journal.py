"""The trainer's journal on its way into the database: each line counts once, however often it is sent.

A segment's row remembers the last line stored and the byte after it, and is locked while lines go in; so two who
deliver the same journal at the same time, or one who delivers it twice, change nothing. Of a segment that the run has
left, metrics, samples and events are accepted from anybody who has the journal; of the active one only the holder of
the lease delivers. State, commands and checkpoints are only the holder's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import func, select, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from ppo_core.errors import RunDirectoryError
from ppo_core.rundir import Event, SegmentDir
from store import commands
from store.alerts import event_fields, take_news
from store.checkpoints import NewCheckpoint, checkpoint_fields, record_checkpoint
from store.events import NewEvent, RunNotFound, append_events
from store.metrics_read import nonfinite_name
from store.metrics_write import IterationMetrics, split_refused, write_metrics
from store.models import Command, Run, Segment
from store.runs import locked_run, transition
from store.samples_write import SamplesUnreadable, write_samples
from store.session import AWAY


def journal_position(session: Session, run_id: str, segment: int) -> tuple[int, int]:
    """The last journal `seq` stored of a segment, and the byte after it."""
    row = session.execute(
        select(Segment.journal_seq, Segment.journal_offset).where(Segment.run_id == run_id, Segment.number == segment)
    ).one_or_none()
    if row is None:
        raise RunNotFound(run_id)
    return row[0], row[1]


def ingest(
    session: Session, run_id: str, segment: int, events: Sequence[Event], offset: int, *, token: int, folder: SegmentDir
) -> None:
    """Store journal lines in the caller's transaction.

    Args:
        events: whole lines in order; those stored already are passed over.
        offset: the byte of the journal after the last of them.
        token: the caller's lease token.
        folder: the segment's folder, for the samples files that lines point to.

    Raises:
        RunDirectoryError: a line is missing between what is stored and what came.
        RunNotFound
    """
    row = session.get(Segment, (run_id, segment), with_for_update=True, populate_existing=True)
    if row is None:
        raise RunNotFound(run_id)
    fresh = [event for event in events if event.seq > row.journal_seq]
    for number, event in enumerate(fresh, start=row.journal_seq + 1):
        if event.seq != number:
            raise RunDirectoryError(f"{folder.journal} goes from line {number - 1} to line {event.seq}")
    if not fresh:
        return
    run = locked_run(session, run_id)
    if run.lease_token != token and run.active_segment == segment:
        return  # Its holder writes and delivers the same journal; taken from here, what it says would not count.
    try:
        _store(session, run_id, segment, fresh, token, folder)
    except DBAPIError as error:
        if isinstance(error, AWAY):
            raise
        for event in fresh:  # The database refused one of them: one at a time, so that it alone is lost.
            _store_alone(session, run_id, segment, event, token, folder)
    row.journal_seq = fresh[-1].seq
    row.journal_offset = max(offset, row.journal_offset)
    session.flush()


def _store(
    session: Session, run_id: str, segment: int, events: Sequence[Event], token: int, folder: SegmentDir
) -> None:
    """Store lines together: all of them, or none where the database refuses one."""
    with session.begin_nested():
        delivery = _Delivery(session, locked_run(session, run_id), segment, token, folder)
        for event in events:
            try:
                delivery.take(event)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                # One line that breaks the contract must not hold up all that follow.
                delivery.note(event, _refusal(event, error))
        delivery.finish()


def _store_alone(session: Session, run_id: str, segment: int, event: Event, token: int, folder: SegmentDir) -> None:
    try:
        _store(session, run_id, segment, [event], token, folder)
    except DBAPIError as error:
        if isinstance(error, AWAY):
            raise
        with session.begin_nested():
            delivery = _Delivery(session, locked_run(session, run_id), segment, token, folder)
            delivery.note(event, _refusal(event, error.orig or error))
            delivery.finish()


def _refusal(event: Event, error: BaseException) -> str:
    why = str(error).partition("\n")[0]
    return f"journal line {event.seq} ({event.type[:20]}) is refused: {type(error).__name__}: {why}"


@dataclass
class _Delivery:
    """One batch of lines. Events of the run are gathered, so that they go in with one statement where they can."""

    session: Session
    run: Run
    segment: int
    token: int
    folder: SegmentDir
    waiting: list[NewEvent] = field(default_factory=list)
    metrics: list[IterationMetrics] = field(default_factory=list)
    progress: dict[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether what the lines say about state, commands and checkpoints counts."""
        return self.run.lease_token == self.token and self.run.active_segment == self.segment

    def take(self, event: Event) -> None:
        match event.type:
            case "phase":
                deadline = timedelta(seconds=min(float(event.payload.get("deadline_s") or 0), 1e7))
                self.progress |= {
                    "phase": event.payload.get("phase"),
                    "progress_deadline_at": func.now() + deadline if deadline else None,
                }
            case "metrics":
                self._metrics(event)
            case "samples":
                self._samples(event)
            case "checkpoint":
                self._checkpoint(event)
            case "ack":
                self._ack(event)
            case "started":
                self._add(event)
                if self.holds and self.run.state == "starting":
                    self._flush_events()
                    transition(self.session, self.run.id, "running", expect_token=self.token)
            case "alert":
                self._alert(event)
            case _:  # gate, preflight, note, end: history only; an end is judged once the processes are gone
                self._add(event)

    def finish(self) -> None:
        self._flush_events()
        write_metrics(
            self.session, self.run.id, self.segment, self.metrics, active=self.run.active_segment == self.segment
        )
        if self.metrics:
            self.progress["iteration"] = max(row.iteration for row in self.metrics)
        if self.progress and self.holds:
            self.session.execute(update(Run).where(Run.id == self.run.id).values(self.progress))

    def _metrics(self, event: Event) -> None:
        good, refused = split_refused(event.payload)
        for sentence in refused:
            self.note(event, sentence)
        self.metrics.append(IterationMetrics(event.iteration, _moment(event), good))
        nonfinite = {name: spelling for name, value in good.items() if (spelling := nonfinite_name(value)) is not None}
        self._add(event, {**good, "nonfinite": nonfinite} if nonfinite else good)

    def _samples(self, event: Event) -> None:
        try:
            path = str(event.payload["path"])
            write_samples(self.session, self.run.id, self.segment, event.iteration, self.folder.path, path)
        except (SamplesUnreadable, KeyError) as error:
            self.note(event, f"samples are not shown: {error}")
        else:
            self._add(event, {"iteration": event.iteration, "num": event.payload.get("num")})

    def _checkpoint(self, event: Event) -> None:
        if not self.holds:
            return
        score = event.payload.get("judge_score")
        new = NewCheckpoint(
            segment=self.segment,
            iteration=event.iteration,
            path=f"{self.folder.path.name}/{event.payload['path']}",
            bytes=event.payload["bytes"],
            manifest_sha256=event.payload["manifest_sha256"],
            reason=event.payload["reason"],
            judge_score=score if score is not None and math.isfinite(score) else None,
        )
        row = record_checkpoint(self.session, self.run.id, new, self.token)
        if row is not None:
            self._add(event, checkpoint_fields(row))

    def _alert(self, event: Event) -> None:
        alert = take_news(self.session, self.run, self.segment, event.iteration, _moment(event), event.payload)
        self._add(event, {**event_fields(alert), "status": event.payload["status"]})

    def _ack(self, event: Event) -> None:
        if not self.holds:
            return
        self._flush_events()
        command, detail = str(event.payload["command"]), event.payload.get("detail")
        asked = self.session.get(Command, command)
        if asked is None or asked.run_id != self.run.id:
            return
        match event.payload.get("status"):
            case "accepted":
                commands.mark_acked(self.session, command, detail)
            case "refused":
                commands.mark_finished(self.session, command, "failed", detail)
            case "done" if event.payload.get("kind") == "checkpoint":
                commands.mark_finished(self.session, command, "done", detail)
            # A stop or pause is done when the processes are gone, not when the trainer says so.

    def note(self, event: Event, message: str) -> None:
        payload = {"level": "warning", "message": message}
        self.waiting.append(NewEvent("note", payload, self.segment, event.iteration, _moment(event)))

    def _add(self, event: Event, payload: dict[str, Any] | None = None) -> None:
        self.waiting.append(
            NewEvent(
                event.type, event.payload if payload is None else payload, self.segment, event.iteration, _moment(event)
            )
        )

    def _flush_events(self) -> None:
        if self.waiting:
            append_events(self.session, self.run.id, self.waiting)
            self.waiting = []


def _moment(event: Event) -> datetime:
    try:
        moment = datetime.fromisoformat(event.time)
    except ValueError:
        return datetime.now(UTC)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
