"""The tables. Migrations beside them make the same schema; a test compares the two.

Postgres is the only truth about runs. Every per-run event has a gapless `seq`, taken from `runs.event_seq` in the
transaction that writes it. What a run *is* is its `state`; what is *asked* of it is a row of `commands`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    SmallInteger,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from store import alert_rule_tables, alert_tables, webhook_tables  # noqa: F401  tables of the same schema
from store.base import Base as Base
from store.base import one_of
from store.states import COMMAND_STATUSES, STATES


class Run(Base):
    """What a user submitted, and how it stands."""

    __tablename__ = "runs"
    __table_args__ = (
        CheckConstraint(one_of("state", STATES), name="runs_state_known"),
        Index("runs_queue", text("priority DESC"), "queued_at", postgresql_where=text("state = 'queued'")),
        Index("runs_newest", text("created_at DESC"), text("id DESC")),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    notes: Mapped[str | None]
    spec: Mapped[dict[str, Any]]
    state: Mapped[str] = mapped_column(server_default="queued")
    reason_code: Mapped[str | None]
    reason_detail: Mapped[str | None]
    hint: Mapped[str | None]
    phase: Mapped[str | None]
    progress_deadline_at: Mapped[datetime | None]
    iteration: Mapped[int] = mapped_column(Integer, server_default="0")
    num_iterations: Mapped[int]
    active_segment: Mapped[int] = mapped_column(Integer, server_default="1")
    priority: Mapped[int] = mapped_column(Integer, server_default="0")
    gpus: Mapped[int] = mapped_column(Integer, server_default="0")
    created_by: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now())
    queued_at: Mapped[datetime] = mapped_column(server_default=func.now())
    not_before: Mapped[datetime | None]  # a requeued run waits until then
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    version: Mapped[int] = mapped_column(Integer, server_default="1")  # ETag; rises with every change of the row
    event_seq: Mapped[int] = mapped_column(BigInteger, server_default="0")
    attempt: Mapped[int] = mapped_column(Integer, server_default="0")
    infrastructure_failures: Mapped[int] = mapped_column(Integer, server_default="0")
    lease_token: Mapped[int] = mapped_column(Integer, server_default="0")
    lease_worker: Mapped[str | None] = mapped_column(ForeignKey("workers.id"))
    lease_expires_at: Mapped[datetime | None]
    supervisor_pid: Mapped[int | None]


class DeletedRun(Base):
    """A run whose rows are gone and whose folder is not yet; this row goes with the folder's last file."""

    __tablename__ = "deleted_runs"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    deleted_by: Mapped[str | None]
    deleted_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Segment(Base):
    """An unbroken stretch of a run's history. A roll back opens a new one; nothing of the old is changed."""

    __tablename__ = "segments"
    __table_args__ = (
        CheckConstraint("kind IN ('start', 'rollback', 'recovery', 'fork')", name="segments_kind_known"),
        Index("segments_started_from", "start_checkpoint"),
    )

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(Integer, primary_key=True)
    kind: Mapped[str] = mapped_column(server_default="start")
    spec: Mapped[dict[str, Any]]
    start_iteration: Mapped[int] = mapped_column(Integer, server_default="0")
    start_checkpoint: Mapped[str | None]  # checkpoints.id; no key, since a fork's lies in another run
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    created_by: Mapped[str | None]
    reason: Mapped[str | None]
    journal_seq: Mapped[int] = mapped_column(BigInteger, server_default="0")  # last journal event stored
    journal_offset: Mapped[int] = mapped_column(BigInteger, server_default="0")  # bytes of the journal stored


class RunEvent(Base):
    """The run's history as people and streams see it: gapless `seq` per run."""

    __tablename__ = "events"
    __table_args__ = (
        Index("events_started", "run_id", "seq", postgresql_where=text("type = 'started'")),
        Index("events_preflight", "run_id", "seq", postgresql_where=text("type = 'preflight'")),
        Index("events_gate", "run_id", "seq", postgresql_where=text("type = 'gate'")),
    )

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    segment: Mapped[int]
    # state | metrics | samples | checkpoint | command | alert | gate | preflight | note | started | end
    type: Mapped[str]
    iteration: Mapped[int | None]
    time: Mapped[datetime] = mapped_column(server_default=func.now())
    actor: Mapped[str | None]
    payload: Mapped[dict[str, Any]]


class Command(Base):
    """One request to a run, followed from asking to outcome."""

    __tablename__ = "commands"
    __table_args__ = (
        CheckConstraint(one_of("status", COMMAND_STATUSES), name="commands_status_known"),
        Index("commands_open", "run_id", postgresql_where=text("finished_at IS NULL")),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    kind: Mapped[str]
    status: Mapped[str] = mapped_column(server_default="pending")
    payload: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'::jsonb"))
    requested_by: Mapped[str | None]
    detail: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    deadline_at: Mapped[datetime]
    delivered_at: Mapped[datetime | None]
    acked_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]

    @property
    def outcome(self) -> dict[str, Any] | None:
        """What a roll back made: its segment and the iteration that it starts from. Null until it is done."""
        outcome: dict[str, Any] | None = self.payload.get("outcome")
        return outcome


class Checkpoint(Base):
    """A whole checkpoint on disk; the row comes after the rename, in one fenced insert."""

    __tablename__ = "checkpoints"
    __table_args__ = (
        UniqueConstraint("run_id", "segment", "iteration"),
        ForeignKeyConstraint(["run_id", "segment"], ["segments.run_id", "segments.number"], ondelete="CASCADE"),
        CheckConstraint("status IN ('good', 'damaged', 'removed')", name="checkpoints_status_known"),
        Index("checkpoints_going", "run_id", postgresql_where=text("status = 'removed' AND NOT files_gone")),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str]
    segment: Mapped[int]
    iteration: Mapped[int]
    path: Mapped[str]  # relative to the run's folder
    bytes: Mapped[int] = mapped_column(BigInteger)
    manifest_sha256: Mapped[str]
    reason: Mapped[str]
    status: Mapped[str] = mapped_column(server_default="good")
    status_detail: Mapped[str | None]
    judge_score: Mapped[float | None]
    pinned: Mapped[bool] = mapped_column(Boolean, server_default=text("false"))
    label: Mapped[str | None]
    lease_token: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    verified_at: Mapped[datetime | None]  # when its files were last compared with its manifest, and were as it says
    files_gone: Mapped[bool] = mapped_column(Boolean, server_default=text("false"))  # of a removed one: nothing is left


class MetricDef(Base):
    """Short number of a metric's name."""

    __tablename__ = "metric_defs"

    id: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=True)
    name: Mapped[str] = mapped_column(unique=True)


class RunIteration(Base):
    """Every x axis of an iteration."""

    __tablename__ = "run_iterations"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    segment: Mapped[int] = mapped_column(Integer, primary_key=True)
    iteration: Mapped[int] = mapped_column(Integer, primary_key=True)
    time: Mapped[datetime]
    tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")  # response tokens trained so far, on its line


class MetricPoint(Base):
    """One value. NULL where the metric is undefined there; NaN and infinities are kept as they are."""

    __tablename__ = "metric_points"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    metric_id: Mapped[int] = mapped_column(ForeignKey("metric_defs.id"), primary_key=True)
    segment: Mapped[int] = mapped_column(Integer, primary_key=True)
    iteration: Mapped[int] = mapped_column(Integer, primary_key=True)
    value: Mapped[float | None]


class MetricRollup(Base):
    """A bucket of `size` iterations (64 or 4096) from `bucket * size`. NaN and infinities only count in `nonfinite`."""

    __tablename__ = "metric_rollup"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    metric_id: Mapped[int] = mapped_column(ForeignKey("metric_defs.id"), primary_key=True)
    segment: Mapped[int] = mapped_column(Integer, primary_key=True)
    size: Mapped[int] = mapped_column(Integer, primary_key=True)
    bucket: Mapped[int] = mapped_column(Integer, primary_key=True)
    min: Mapped[float | None]
    max: Mapped[float | None]
    sum: Mapped[float] = mapped_column(server_default="0")
    n: Mapped[int] = mapped_column(Integer, server_default="0")
    first: Mapped[float | None]
    first_iteration: Mapped[int | None]
    last: Mapped[float | None]
    last_iteration: Mapped[int | None]
    nonfinite: Mapped[int] = mapped_column(Integer, server_default="0")


class LatestMetric(Base):
    """The newest value of each metric on the run's active line."""

    __tablename__ = "latest_metrics"

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    metric_id: Mapped[int] = mapped_column(ForeignKey("metric_defs.id"), primary_key=True)
    segment: Mapped[int]
    iteration: Mapped[int]
    value: Mapped[float | None]


class Sample(Base):
    """A kept response with its token record. Text is data: NUL is stored as U+2400, a lone surrogate as U+FFFD."""

    __tablename__ = "samples"
    __table_args__ = (UniqueConstraint("run_id", "segment", "iteration", "kind", "index"),)

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    segment: Mapped[int]
    iteration: Mapped[int]
    kind: Mapped[str]  # train | held_out
    index: Mapped[int]  # row in the iteration's batch
    prompt: Mapped[str]
    response: Mapped[str]
    score: Mapped[float | None]
    length: Mapped[int]
    finish_reason: Mapped[str]
    tokens: Mapped[dict[str, Any]]


class Worker(Base):
    """A machine's worker, alive as long as its heartbeat is fresh."""

    __tablename__ = "workers"
    __table_args__ = (CheckConstraint("state IN ('active', 'draining', 'gone')", name="workers_state_known"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    host: Mapped[str]
    pid: Mapped[int]
    state: Mapped[str] = mapped_column(server_default="active")
    cpu_slots: Mapped[int]
    gpus: Mapped[int]
    version: Mapped[str]
    data_token: Mapped[str]  # also in PPO_DATA_DIR/workers/ID: whoever reads both there shares the folder
    folder_fault: Mapped[str | None]  # why it claims nothing: it does not see the platform's data folder
    devices: Mapped[list[Any]] = mapped_column(server_default=text("'[]'::jsonb"))  # of GPU slots: name, memory_gib
    drain_asked_by: Mapped[str | None]
    drain_asked_at: Mapped[datetime | None]  # until somebody enables it again, however often it restarts
    started_at: Mapped[datetime] = mapped_column(server_default=func.now())
    heartbeat_at: Mapped[datetime] = mapped_column(server_default=func.now())


class DataFolder(Base):
    """The platform's data folder, by the id that lies in it. One row, from the first worker or reconciler on."""

    __tablename__ = "data_folder"
    __table_args__ = (CheckConstraint("id = 1", name="data_folder_one_row"),)

    id: Mapped[int] = mapped_column(SmallInteger, primary_key=True, autoincrement=False, server_default="1")
    folder_id: Mapped[str]
    named_by: Mapped[str]
    named_at: Mapped[datetime] = mapped_column(server_default=func.now())


class WorkerSlot(Base):
    """A GPU or a CPU slot; taken in the same transaction as the claim of the run that holds it."""

    __tablename__ = "worker_slots"
    __table_args__ = (CheckConstraint("kind IN ('cpu', 'gpu')", name="worker_slots_kind_known"),)

    worker_id: Mapped[str] = mapped_column(ForeignKey("workers.id", ondelete="CASCADE"), primary_key=True)
    kind: Mapped[str] = mapped_column(primary_key=True)
    index: Mapped[int] = mapped_column(Integer, primary_key=True)
    run_id: Mapped[str | None] = mapped_column(ForeignKey("runs.id", ondelete="SET NULL"))


class ApiKey(Base):
    """A bearer key. Only its SHA-256 is kept; the key itself is shown once."""

    __tablename__ = "api_keys"
    __table_args__ = (CheckConstraint("role IN ('viewer', 'operator', 'admin')", name="api_keys_role_known"),)

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    sha256: Mapped[str] = mapped_column(unique=True)
    role: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class LoginLink(Base):
    """A link that signs a browser in once."""

    __tablename__ = "login_links"

    sha256: Mapped[str] = mapped_column(primary_key=True)
    role: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]
    used_at: Mapped[datetime | None]


class BrowserSession(Base):
    """A signed-in browser: its cookie's SHA-256, and the token its mutations must carry."""

    __tablename__ = "browser_sessions"

    sha256: Mapped[str] = mapped_column(primary_key=True)
    csrf_token: Mapped[str]
    role: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime]


class IdempotencyKey(Base):
    """The answer to a create request, kept in the transaction that created."""

    __tablename__ = "idempotency_keys"

    key: Mapped[str] = mapped_column(primary_key=True)
    route: Mapped[str] = mapped_column(primary_key=True)
    principal: Mapped[str] = mapped_column(primary_key=True)
    body_sha256: Mapped[str]
    resource_id: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class AuditEntry(Base):
    """Who changed what."""

    __tablename__ = "audit"

    id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=True)
    time: Mapped[datetime] = mapped_column(server_default=func.now())
    actor: Mapped[str]
    action: Mapped[str]
    target: Mapped[str]
    detail: Mapped[dict[str, Any]]
