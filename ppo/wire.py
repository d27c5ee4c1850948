"""What the service sends, as typed dictionaries. A test compares them with the OpenAPI description.

Times are RFC 3339 texts in UTC. Only null means undefined; NaN and the infinities travel as null, and `nonfinite`
beside them says so.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

State = Literal[
    "queued", "starting", "running", "pausing", "paused", "stopping", "killing", "stopped", "cancelled",
    "recovering", "failed", "succeeded",
]  # fmt: skip
TERMINAL: frozenset[str] = frozenset({"stopped", "cancelled", "failed", "succeeded"})
Role = Literal["viewer", "operator", "admin"]
Axis = Literal["iteration", "time", "tokens"]
AlertStatus = Literal["open", "cleared", "left"]
Severity = Literal["warning", "critical"]


class Command(TypedDict):
    id: str
    run_id: str
    kind: str
    status: Literal["pending", "delivered", "acked", "done", "failed", "superseded", "timed_out"]
    detail: str | None
    outcome: dict[str, Any] | None
    requested_by: str | None
    created_at: str
    deadline_at: str
    delivered_at: str | None
    acked_at: str | None
    finished_at: str | None


class AlertCounts(TypedDict):
    warning: int
    critical: int
    snoozed: int


class Run(TypedDict):
    id: str
    name: str
    notes: str | None
    state: State
    health: Literal["ok", "late", "unreachable", "degraded"]
    phase: str | None
    reason_code: str | None
    reason_detail: str | None
    hint: str | None
    iteration: int
    num_iterations: int
    active_segment: int
    priority: int
    gpus: int
    created_by: str | None
    created_at: str
    queued_at: str
    started_at: str | None
    ended_at: str | None
    attempt: int
    version: int
    event_seq: int
    waiting_reason: str | None
    has_judge: bool
    alerts: AlertCounts
    latest: dict[str, float | None]


class RunDetail(Run):
    spec: dict[str, Any]
    spec_yaml: str
    open_commands: list[Command]


class AlertRules(TypedDict):
    alerts: dict[str, Any]
    version: int
    changed_by: str | None
    changed_at: str | None


class DryRun(TypedDict):
    spec: dict[str, Any]
    spec_yaml: str
    warnings: list[str]
    estimate: dict[str, Any]
    meaning: list[str]
    from_alert_rules: list[str]


class LatestMetric(TypedDict):
    name: str
    value: float | None
    nonfinite: Literal["NaN", "Infinity", "-Infinity"] | None
    iteration: int
    segment: int


class LatestMetrics(TypedDict):
    cursor: int
    latest: list[LatestMetric]


class Series(TypedDict):
    run: str
    name: str
    segment: int
    active: bool
    bucket: int
    x: list[float]
    y: list[float | None]
    min: list[float | None]
    max: list[float | None]
    nonfinite: list[int]


class MetricQuery(TypedDict):
    series: list[Series]
    cursors: dict[str, int]


class Sample(TypedDict):
    id: int
    segment: int
    iteration: int
    kind: Literal["train", "held_out"]
    index: int
    prompt: str
    response: str
    score: float | None
    length: int
    finish_reason: str


class SampleTokens(TypedDict):
    ids: list[int]
    texts: list[str]
    logprobs: list[float | None] | None
    ref_logprobs: list[float | None] | None
    kl: list[float | None] | None
    rewards: list[float | None] | None
    values: list[float | None] | None
    advantages: list[float | None] | None
    returns: list[float | None] | None
    penalized_score: float | None
    judge_score: float | None
    judge_against_last: float | None
    judge_against_start: float | None


class Checkpoint(TypedDict):
    id: str
    segment: int
    iteration: int
    path: str
    bytes: int
    manifest_sha256: str
    reason: str
    status: Literal["good", "damaged", "removed"]
    status_detail: str | None
    judge_score: float | None
    pinned: bool
    label: str | None
    created_at: str
    verified_at: str | None
    protected: list[str]
    etag: str


class StartedFrom(TypedDict):
    run_id: str
    segment: int
    iteration: int


class SettingChange(TypedDict):
    path: str
    before: Any
    after: Any


class LineageSegment(TypedDict):
    number: int
    kind: Literal["start", "rollback", "recovery", "fork"]
    active: bool
    start_iteration: int
    last_iteration: int
    on_active_line: tuple[int, int] | None
    start_checkpoint: str | None
    started_from: StartedFrom | None
    created_at: str
    created_by: str | None
    reason: str | None


class Segment(LineageSegment):
    changes: list[SettingChange]


class LineageRun(TypedDict):
    id: str
    name: str
    state: State
    segments: list[LineageSegment]


class Lineage(TypedDict):
    runs: list[LineageRun]
    complete: bool


class Change(TypedDict):
    path: str
    at_checkpoint: Any
    now: Any
    then: Any
    changeable: Literal["rollback", "fork", "never"]


class LeftBehind(TypedDict):
    segment: int
    from_iteration: int
    to_iteration: int
    checkpoints: int


class ForkPreview(TypedDict):
    checkpoint: Checkpoint
    spec: dict[str, Any]
    spec_yaml: str
    changes: list[Change]
    warnings: list[str]
    estimate: dict[str, Any]
    meaning: list[str]


class RollbackPreview(ForkPreview):
    left_behind: LeftBehind | None
    repeats_exactly: bool


class Verification(TypedDict):
    ok: bool
    status: Literal["good", "damaged"]
    detail: str | None
    files: int
    bytes: int
    seconds: float


class GcItem(TypedDict):
    checkpoint: str
    segment: int
    iteration: int
    bytes: int
    stays: bool
    reasons: list[str]


class GcPreview(TypedDict):
    items: list[GcItem]
    freed_bytes: int


class Event(TypedDict):
    seq: int
    segment: int
    type: str
    iteration: int | None
    time: str
    actor: str | None
    payload: dict[str, Any]


class EventPage(TypedDict):
    items: list[Event]
    cursor: int


class LogText(TypedDict):
    text: str
    offset: int
    next_offset: int
    size: int


class LogFile(TypedDict):
    source: Literal["trainer", "supervisor"]
    attempt: int | None
    rank: int | None
    segment: int | None
    size: int
    modified_at: str


class LogMatch(TypedDict):
    offset: int
    line_offset: int
    line: str


class LogMatches(TypedDict):
    items: list[LogMatch]
    offset: int
    next_offset: int
    size: int


class Preset(TypedDict):
    name: str
    title: str
    description: str
    spec_yaml: str


class Slot(TypedDict):
    kind: Literal["gpu", "cpu"]
    index: int
    device: str | None
    memory_gib: float | None
    run_id: str | None
    run_name: str | None
    run_state: State | None


class Worker(TypedDict):
    id: str
    host: str
    state: Literal["active", "draining", "gone"]
    cpu_slots: int
    gpus: int
    busy_slots: int
    slots: list[Slot]
    started_at: str
    heartbeat_at: str
    silent_s: float
    drain_asked_by: str | None
    drain_asked_at: str | None
    data_shared: bool
    folder_fault: str | None
    version: str


class Me(TypedDict):
    role: Role
    name: str
    csrf_token: str | None


class FaultMessage(TypedDict):
    pointer: str
    message: str


class RollbackWish(TypedDict):
    checkpoint: str
    set: dict[str, Any]
    reason: str


class Suggestion(TypedDict):
    reason: str
    changes: dict[str, Any]
    segment: int | None
    iteration: int | None
    rollback: RollbackWish | None


class Evidence(TypedDict):
    metric: str | None
    then: Any
    now: Any
    text: str


class Alert(TypedDict):
    id: str
    run_id: str
    run_name: str
    segment: int
    key: str
    rule: str
    kind: Literal["band", "story", "gate"]
    status: AlertStatus
    severity: Severity
    title: str
    detail: str
    meaning: str
    remedy: str
    metrics: list[str]
    iteration: int
    onset: int
    value: float | None
    baseline: float | None
    bound: float | None
    evidence: list[Evidence]
    action: Literal["note", "pause", "stop"]
    suggestion: Suggestion | None
    raised_at: str
    cleared_at: str | None
    cleared_iteration: int | None
    acknowledged_at: str | None
    acknowledged_by: str | None
    snoozed_until: str | None
    snoozed_by: str | None
    snoozed: bool


class AlertDetail(Alert):
    snapshot: dict[str, list[tuple[int, float | None]]]


class Finding(TypedDict):
    check: str
    status: Literal["ok", "warning", "failed"]
    detail: str
    remedy: str


class Preflight(TypedDict):
    time: str | None
    segment: int | None
    findings: list[Finding]
    numbers: dict[str, Any]


class GateWins(TypedDict):
    wins: int
    ties: int
    losses: int
    rate: float | None
    low: float | None
    high: float | None
    asked: int | None
    swayed: int | None
    unreadable: int | None


class GateRise(TypedDict):
    mean: float | None
    standard_error: float | None


class Gate(TypedDict):
    segment: int
    iteration: int
    time: str
    active: bool
    tripped: bool
    explanation: str
    against_last: GateWins
    against_start: GateWins
    rise: GateRise
    num_suspect: int


class Webhook(TypedDict):
    id: str
    name: str
    url: str
    events: list[str]
    enabled: bool
    disabled_reason: str | None
    created_by: str | None
    created_at: str
    old_secrets_until: str | None
    pending: int
    dead: int


class NewWebhook(Webhook):
    secret: str


class Delivery(TypedDict):
    id: str
    event_id: str
    event: str
    status: Literal["pending", "delivered", "dead"]
    attempts: int
    next_attempt_at: str | None
    last_status: int | None
    last_error: str | None
    created_at: str
    finished_at: str | None
