"""What travels over REST: typed requests and responses. Times are RFC 3339 in UTC, non-finite numbers are null.

`null` alone means undefined; where a number was NaN or infinite, a `nonfinite` field beside it says so.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, field_validator, model_validator

from ppo_core.registry import Metric
from store.states import State

Role = Literal["viewer", "operator", "admin"]
Health = Literal["ok", "late", "unreachable", "degraded"]
CommandStatus = Literal["pending", "delivered", "acked", "done", "failed", "superseded", "timed_out"]
NonFinite = Literal["NaN", "Infinity", "-Infinity"]


def _rfc3339(value: datetime) -> str:
    return value.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


Time = Annotated[datetime, PlainSerializer(_rfc3339, return_type=str)]
Item = TypeVar("Item")


class Message(BaseModel):
    """Base of everything sent; `of` reads attributes of a row."""

    model_config = ConfigDict(from_attributes=True, extra="ignore", json_schema_serialization_defaults_required=True)


class Body(BaseModel):
    """Base of everything received: unknown fields fail."""

    model_config = ConfigDict(extra="forbid")


class Page(Message, Generic[Item]):
    """One page of a list; `next` is the cursor of the page after it, null at the end."""

    items: list[Item]
    next: str | None = None


class FaultMessage(Message):
    """One thing wrong with a request. `pointer` is a JSON pointer into the body or spec, or `/query/name`."""

    pointer: str
    message: str


class Problem(Message):
    """An error (RFC 9457, application/problem+json)."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    request_id: str
    errors: list[FaultMessage] = []
    allowed: list[str] | None = Field(None, description="Moves that the run's state allows, after an illegal one.")


class Command(Message):
    """What is asked of a run: pending, delivered, acked, then done, failed, superseded or timed_out."""

    id: str
    run_id: str
    kind: str
    status: CommandStatus
    detail: str | None
    outcome: dict[str, Any] | None = Field(
        description="What a roll back made: `segment` and the `iteration` it starts from; null until it is done."
    )
    requested_by: str | None
    created_at: Time
    deadline_at: Time
    delivered_at: Time | None
    acked_at: Time | None
    finished_at: Time | None


class AlertCounts(Message):
    """How many alerts are open, by severity; snoozed ones are counted apart."""

    warning: int
    critical: int
    snoozed: int


class Run(Message):
    """How a run stands."""

    id: str
    name: str
    notes: str | None = Field(description="What people wrote about it.")
    state: State
    health: Health = Field(
        description="unreachable: no sign of its worker; late: no progress in time; degraded: restarted after a loss."
    )
    phase: str | None
    reason_code: str | None = Field(description="Why it is in this state, or of this health: a stable word.")
    reason_detail: str | None = Field(description="The same as a sentence.")
    hint: str | None = Field(description="What to do about it.")
    iteration: int
    num_iterations: int
    active_segment: int
    priority: int
    gpus: int
    created_by: str | None
    created_at: Time
    queued_at: Time
    started_at: Time | None
    ended_at: Time | None
    attempt: int
    version: int
    event_seq: int
    waiting_reason: str | None = Field(description="Why a queued run does not start yet.")
    has_judge: bool = Field(description="False: nothing watches for reward hacking.")
    alerts: AlertCounts = Field(description="Alerts that are open on the active line.")
    latest: dict[str, float | None] = Field(description="Newest value of each metric on the active line.")


class RunDetail(Run):
    """A run with its full effective spec."""

    spec: dict[str, Any]
    spec_yaml: str
    open_commands: list[Command]


class RunChange(Body):
    """What a person may change of a run; a field that is left out stays as it is. Its spec stays what was submitted."""

    name: str | None = Field(None, min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]+$")
    notes: str | None = Field(None, max_length=10_000, description="Text for people; null takes it away.")
    priority: int | None = Field(
        None, ge=-100, le=100, description="Higher is claimed first. A roll back takes the spec's."
    )

    @model_validator(mode="after")
    def _something(self) -> RunChange:
        if not self.model_fields_set:
            raise ValueError("give `name`, `notes`, `priority` or several of them")
        for field in ("name", "priority"):
            if field in self.model_fields_set and getattr(self, field) is None:
                raise ValueError(f"`{field}` cannot be null; leave it out to keep it as it is")
        return self


class SpecBody(Body):
    """A run spec, as a mapping or as YAML text: exactly one of the two."""

    spec: dict[str, Any] | None = None
    spec_yaml: str | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> SpecBody:
        if (self.spec is None) == (self.spec_yaml is None):
            raise ValueError("give either `spec` (a mapping) or `spec_yaml` (text)")
        return self


class DryRun(Message):
    """What a spec would do, without queueing anything."""

    spec: dict[str, Any]
    spec_yaml: str
    warnings: list[str]
    estimate: dict[str, Any]
    meaning: list[str] = Field(description="What the spec means in numbers, a sentence a line.")
    from_alert_rules: list[str] = Field(
        description="Dotted names of the fields of `spec` that the platform's alert rules filled in."
    )


class LatestMetric(Message):
    """The newest value of one metric."""

    name: str
    value: float | None
    nonfinite: NonFinite | None
    iteration: int
    segment: int


class LatestMetrics(Message):
    """Newest values, and the event sequence number that they are at least as new as."""

    cursor: int
    latest: list[LatestMetric]


class Series(Message):
    """One metric of one run along one segment, in columns. With `bucket` above 1, `y` is the mean of a bucket."""

    run: str
    name: str
    segment: int
    active: bool = Field(description="False: left behind by a roll back.")
    bucket: int = Field(description="Iterations a point: 1, or a power of two.")
    x: list[float]
    y: list[float | None]
    min: list[float | None]
    max: list[float | None]
    nonfinite: list[int] = Field(description="Indices of points that hold NaN or an infinity.")


class MetricQuery(Message):
    """The series asked for; follow each run's events from its cursor on and nothing is missed."""

    series: list[Series]
    cursors: dict[str, int]


class Registry(Message):
    """Every metric's definition, and the panels' titles in their order. A name with `*` stands for a family."""

    items: list[Metric]
    panels: dict[str, str]


class Sample(Message):
    """A kept response. Texts are data: they may hold anything."""

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


class SampleTokens(Message):
    """Every token of a kept response, with what was recorded of it; columns not recorded are null."""

    ids: list[int]
    texts: list[str] = Field([])
    logprobs: list[float | None] | None = None
    ref_logprobs: list[float | None] | None = None
    kl: list[float | None] | None = None
    rewards: list[float | None] | None = None
    values: list[float | None] | None = None
    advantages: list[float | None] | None = None
    returns: list[float | None] | None = None
    penalized_score: float | None = None
    judge_score: float | None = Field(None, description="The judge's, of a held-out answer.")
    judge_against_last: float | None = Field(
        None, description="Whether a judge by comparison preferred it to the last gate's answer: 1, 0 (a tie) or -1."
    )
    judge_against_start: float | None = Field(None, description="The same against the starting policy's answer.")


class Checkpoint(Message):
    """A whole checkpoint."""

    id: str
    segment: int
    iteration: int
    path: str
    bytes: int
    manifest_sha256: str
    reason: str
    status: Literal["good", "damaged", "removed"]
    status_detail: str | None = Field(description="Why it is damaged or removed.")
    judge_score: float | None
    pinned: bool
    label: str | None
    created_at: Time
    verified_at: Time | None = Field(description="When its files were last compared with its manifest and agreed.")
    protected: list[str] = Field(description="Why it stays, a reason a line; empty: the next pruning removes it.")
    etag: str = Field(description="What If-Match takes to change or delete it.")


class Event(Message):
    """One entry of a run's history; `seq` has no gaps."""

    seq: int
    segment: int
    type: str
    iteration: int | None
    time: Time
    actor: str | None
    payload: dict[str, Any]


class EventPage(Message):
    """Events after a sequence number; `cursor` is where to go on."""

    items: list[Event]
    cursor: int


class Preset(Message):
    """A spec to begin with."""

    name: str
    title: str
    description: str
    spec_yaml: str


class LoginBody(Body):
    """The token of a one-time login link."""

    token: str = Field(min_length=1, max_length=256)


class Login(Message):
    """A browser's session has begun; mutations carry `csrf_token` in X-CSRF-Token."""

    role: Role
    csrf_token: str


class Me(Message):
    """Who is asking. `csrf_token` is null for bearer keys, which need none."""

    role: Role
    name: str
    csrf_token: str | None


class KeyBody(Body):
    """A new bearer key."""

    name: str = Field(min_length=1, max_length=128)
    role: Role
    expires_at: datetime | None = None

    @field_validator("name")
    @classmethod
    def _no_nul(cls, name: str) -> str:
        if "\x00" in name:
            raise ValueError("the name holds a NUL character")
        return name

    @field_validator("expires_at")
    @classmethod
    def _knows_its_zone(cls, time: datetime | None) -> datetime | None:
        if time is not None and time.tzinfo is None:
            raise ValueError("give the time with its zone, as in 2030-01-31T12:00:00Z")
        return time


class Key(Message):
    """A bearer key, without its secret."""

    id: str
    name: str
    role: Role
    created_at: Time
    expires_at: Time | None
    last_used_at: Time | None
    revoked_at: Time | None


class NewKey(Key):
    """A key just made; `key` is shown this once."""

    key: str


class Alive(Message):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Ready(Message):
    """Whether requests can be served, and how each dependency is. Without a broker runs still start, a little later."""

    ready: bool
    checks: dict[str, Literal["ok", "slow", "unreachable", "none"]]


class Version(Message):
    """The product and its version."""

    name: str
    version: str
