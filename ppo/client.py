"""The typed Python client of a platform.

    with ppo.Client() as client:
        run = client.submit(Path("spec.yaml").read_text())
        for event in client.follow(run["id"]):
            print(event["type"], event["payload"])

Answers are dictionaries as the service sends them (see `ppo.wire`); whatever is no success is an exception that
carries the service's own words. It knows REST only: no database, no files of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, cast
from urllib.parse import quote
from uuid import uuid4

from ppo import client_waiting
from ppo.access import find_access
from ppo.client_alerts import Alerts, PlatformAlertRules, Webhooks
from ppo.client_errors import (
    AccessError,
    ClientError,
    NotFoundError,
    RefusedError,
    RequestError,
    UnreachableError,
    WaitTimeoutError,
)
from ppo.client_waiting import PATIENCE_S, has_ended
from ppo.connection import PAGE, TIMEOUT_S, Connection
from ppo.wire import (
    Axis,
    Checkpoint,
    Command,
    DryRun,
    Event,
    EventPage,
    ForkPreview,
    Gate,
    GcPreview,
    LatestMetrics,
    Lineage,
    LogFile,
    LogMatch,
    LogMatches,
    LogText,
    Me,
    MetricQuery,
    Preset,
    RollbackPreview,
    Run,
    RunDetail,
    Sample,
    SampleTokens,
    Segment,
    Verification,
    Worker,
)

__all__ = [
    "AccessError",
    "Client",
    "ClientError",
    "NotFoundError",
    "RefusedError",
    "RequestError",
    "UnreachableError",
    "WaitTimeoutError",
    "has_ended",
]

VERIFY_TIMEOUT_S = 3600.0  # A large checkpoint is read whole.
_DRY = {"dry_run": "true"}


class Client:
    """One platform. `url` and `key` come from the environment or from a local platform's file when not given."""

    def __init__(self, url: str | None = None, key: str | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        if url is None or key is None:
            access = find_access()
            url, key = url or access.url, key or access.key
        self._connection = Connection(url, key, timeout_s)
        self.alerts = Alerts(self._connection)
        self.alert_rules = PlatformAlertRules(self._connection)
        self.webhooks = Webhooks(self._connection)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Runs

    def submit(self, spec: str | Mapping[str, Any], *, idempotency_key: str | None = None) -> Run:
        """Queue a run of `spec` (YAML text or a mapping). With a key of one's own, repeating it makes no second run."""
        headers = {"Idempotency-Key": idempotency_key or uuid4().hex}
        return cast(Run, self._connection.repeat("POST", "/v1/runs", json=_spec_body(spec), headers=headers))

    def dry_run(self, spec: str | Mapping[str, Any]) -> DryRun:
        """What a spec would do; nothing is queued."""
        return cast(DryRun, self._connection.repeat("POST", "/v1/runs", json=_spec_body(spec), params=_DRY))

    def runs(self, *, states: Sequence[str] = (), match: str | None = None) -> Iterator[Run]:
        """Runs, newest first, all pages; with `match` those whose id or name begins with it."""
        return cast(Iterator[Run], self._connection.pages("/v1/runs", {"state": list(states), "match": match}))

    def run(self, run_id: str) -> RunDetail:
        """A run as it stands, with its full spec."""
        return cast(RunDetail, self._connection.get(f"/v1/runs/{_part(run_id)}"))

    def change(self, run_id: str, **fields: Any) -> RunDetail:
        """Set a run's `name`, `notes` or `priority`; what is not given stays."""
        path = f"/v1/runs/{_part(run_id)}"
        seen = {"If-Match": f'"{self.run(run_id)["version"]}"'}
        return cast(RunDetail, self._connection.once("PATCH", path, json=fields, headers=seen))

    def delete_run(self, run_id: str, *, version: int | None = None) -> None:
        """Delete a run with all that it left, for good. With `version` only as it was when it was looked at.

        Raises:
            RequestError: 409, it has not ended, or other runs started from its checkpoints; the message names them.
        """
        seen = self.run(run_id)["version"] if version is None else version
        self._connection.once("DELETE", f"/v1/runs/{_part(run_id)}", headers={"If-Match": f'"{seen}"'})

    def stop(self, run_id: str) -> Command:
        """Ask a run to stop with a checkpoint.

        Raises:
            RefusedError: it has ended already; the message says how.
        """
        return cast(Command, self._connection.once("POST", f"/v1/runs/{_part(run_id)}/stop"))

    def kill(self, run_id: str) -> Command:
        """Have a run's processes ended at once, without a checkpoint. It becomes cancelled.

        Raises:
            RefusedError: it has ended already; the message says how.
        """
        return cast(Command, self._connection.once("POST", _run(run_id, "kill")))

    def command(self, run_id: str, command_id: str) -> Command:
        """What became of a command."""
        return cast(Command, self._connection.get(f"/v1/runs/{_part(run_id)}/commands/{_part(command_id)}"))

    def wait_command(self, run_id: str, command_id: str, *, timeout_s: float | None = None) -> Command:
        """A command once it has its outcome; a service that restarts meanwhile is waited for.

        Raises:
            WaitTimeoutError: it had none after `timeout_s`.
            UnreachableError: the platform did not answer for a long time.
        """
        return client_waiting.wait_command(self, run_id, command_id, timeout_s)

    # Going back, and on

    def rollback(
        self,
        run_id: str,
        checkpoint_id: str,
        *,
        settings: Mapping[str, Any] | None = None,
        reason: str | None = None,
        version: int | None = None,
        idempotency_key: str | None = None,
    ) -> Command:
        """Take a run back to one of its checkpoints, with `settings` ({"kl.coef": 0.1}) changed. Nothing is deleted.

        With the `version` of the run that was looked at, a run that changed since is left alone.

        Raises:
            RefusedError: it is being stopped, or another roll back is under way.
        """
        seen = self.run(run_id)["version"] if version is None else version
        headers = {"Idempotency-Key": idempotency_key or uuid4().hex, "If-Match": f'"{seen}"'}
        body = {"checkpoint": checkpoint_id, "set": dict(settings or {}), "reason": reason}
        return cast(Command, self._connection.repeat("POST", _run(run_id, "rollback"), json=body, headers=headers))

    def rollback_preview(
        self, run_id: str, checkpoint_id: str, *, settings: Mapping[str, Any] | None = None
    ) -> RollbackPreview:
        """What a roll back would change and leave behind; nothing is done."""
        body = {"checkpoint": checkpoint_id, "set": dict(settings or {})}
        return cast(RollbackPreview, self._connection.repeat("POST", _run(run_id, "rollback"), json=body, params=_DRY))

    def fork(
        self,
        run_id: str,
        checkpoint_id: str,
        *,
        settings: Mapping[str, Any] | None = None,
        name: str | None = None,
        reason: str | None = None,
        idempotency_key: str | None = None,
    ) -> Run:
        """Queue a new run that goes on from a checkpoint of this one."""
        headers = {"Idempotency-Key": idempotency_key or uuid4().hex}
        body = {"checkpoint": checkpoint_id, "set": dict(settings or {}), "name": name, "reason": reason}
        return cast(Run, self._connection.repeat("POST", _run(run_id, "forks"), json=body, headers=headers))

    def fork_preview(
        self, run_id: str, checkpoint_id: str, *, settings: Mapping[str, Any] | None = None, name: str | None = None
    ) -> ForkPreview:
        """What a fork would be; nothing is queued."""
        body = {"checkpoint": checkpoint_id, "set": dict(settings or {}), "name": name}
        return cast(ForkPreview, self._connection.repeat("POST", _run(run_id, "forks"), json=body, params=_DRY))

    def resume(self, run_id: str) -> Command:
        """Queue a paused or stopped run again."""
        return cast(Command, self._connection.once("POST", _run(run_id, "resume")))

    def retry(self, run_id: str) -> Command:
        """Queue a failed or cancelled run again."""
        return cast(Command, self._connection.once("POST", _run(run_id, "retry")))

    def pause(self, run_id: str) -> Command:
        """Have a run save and wait until it is resumed."""
        return cast(Command, self._connection.once("POST", _run(run_id, "pause")))

    def checkpoint(self, run_id: str) -> Command:
        """Have a run save after its present iteration, and go on."""
        return cast(Command, self._connection.once("POST", _run(run_id, "checkpoint")))

    def lineage(self, run_id: str) -> Lineage:
        """The run, those it was forked from, and its forks with theirs."""
        return cast(Lineage, self._connection.get(_run(run_id, "lineage")))

    # What a run leaves

    def metrics(self, run_id: str) -> LatestMetrics:
        """The newest value of each metric."""
        return cast(LatestMetrics, self._connection.get(f"/v1/runs/{_part(run_id)}/metrics"))

    def query(
        self,
        runs: Sequence[str],
        names: Sequence[str],
        *,
        x: Axis = "iteration",
        start: float | None = None,
        end: float | None = None,
        max_points: int = 500,
        segments: Literal["active", "all"] = "active",
    ) -> MetricQuery:
        """Series of metrics in columns, thinned to `max_points` with their extremes kept."""
        params = {
            "runs": ",".join(runs),
            "names": ",".join(names),
            "x": x,
            "from": start,
            "to": end,
            "max_points": max_points,
            "segments": segments,
        }
        return cast(MetricQuery, self._connection.get("/v1/metrics/query", params))

    def samples(
        self, run_id: str, *, iteration: int | None = None, kind: Literal["train", "held_out"] | None = None
    ) -> Iterator[Sample]:
        """Kept responses, newest iteration first, all pages."""
        found = self._connection.pages(f"/v1/runs/{_part(run_id)}/samples", {"iteration": iteration, "kind": kind})
        return cast(Iterator[Sample], found)

    def sample_tokens(self, sample_id: int) -> SampleTokens:
        """Every token of a kept response, with what was recorded of it."""
        return cast(SampleTokens, self._connection.get(f"/v1/samples/{sample_id}/tokens"))

    def checkpoints(self, run_id: str) -> list[Checkpoint]:
        """All checkpoints of a run, oldest first."""
        return list(cast(Iterator[Checkpoint], self._connection.pages(_run(run_id, "checkpoints"), {})))

    def segments(self, run_id: str) -> list[Segment]:
        """The stretches of a run's history, in the order in which they began."""
        return list(cast(Iterator[Segment], self._connection.pages(_run(run_id, "segments"), {})))

    def gates(self, run_id: str) -> list[Gate]:
        """The judge gates that were held, the first first."""
        return list(cast(Iterator[Gate], self._connection.pages(_run(run_id, "gates"), {})))

    def gc_preview(
        self, run_id: str, *, keep_last: int | None = None, keep_every: int | None = None, keep_best: int | None = None
    ) -> GcPreview:
        """What pruning would remove, and why the others stay, under the run's rules or others; nothing is done."""
        rules = {"keep_last": keep_last, "keep_every": keep_every, "keep_best": keep_best}
        return cast(GcPreview, self._connection.get(f"/v1/runs/{_part(run_id)}/checkpoints:gc-preview", rules))

    def verify(self, run_id: str, checkpoint_id: str) -> Verification:
        """Compare every file of a checkpoint with its manifest. It may take minutes."""
        path = f"{_checkpoint(run_id, checkpoint_id)}/verify"
        return cast(Verification, self._connection.once("POST", path, longest_s=VERIFY_TIMEOUT_S))

    def pin(self, run_id: str, checkpoint_id: str) -> Checkpoint:
        """Have a checkpoint stay until the pin is taken away."""
        return self._change(run_id, checkpoint_id, {"pinned": True})

    def unpin(self, run_id: str, checkpoint_id: str) -> Checkpoint:
        """Leave a checkpoint to the rules again."""
        return self._change(run_id, checkpoint_id, {"pinned": False})

    def label(self, run_id: str, checkpoint_id: str, text: str | None) -> Checkpoint:
        """Name a checkpoint, or take its name away."""
        return self._change(run_id, checkpoint_id, {"label": text})

    def delete(self, run_id: str, checkpoint_id: str) -> None:
        """Remove a checkpoint.

        Raises:
            RequestError: 409, something needs it; the message says what.
        """
        path = _checkpoint(run_id, checkpoint_id)
        self._connection.once("DELETE", path, headers={"If-Match": self._connection.get(path)["etag"]})

    def download(self, run_id: str, checkpoint_id: str, target: Path, *, part: Literal["all", "policy"] = "all") -> int:
        """Write a checkpoint, or its policy alone, to `target` as a tar file; returns its bytes.

        It is written aside and renamed: a transfer that breaks off leaves no file that looks whole.

        Raises:
            UnreachableError: it broke off; the file was damaged, or the service went away.
        """
        return self._connection.download(f"{_checkpoint(run_id, checkpoint_id)}/download", {"part": part}, target)

    def _change(self, run_id: str, checkpoint_id: str, fields: Mapping[str, Any]) -> Checkpoint:
        path = _checkpoint(run_id, checkpoint_id)
        seen = {"If-Match": self._connection.get(path)["etag"]}
        return cast(Checkpoint, self._connection.once("PATCH", path, json=fields, headers=seen))

    def logs(
        self,
        run_id: str,
        *,
        source: Literal["trainer", "supervisor"] = "trainer",
        attempt: int | None = None,
        rank: int = 0,
        offset: int = 0,
        limit: int = 65536,
    ) -> LogText:
        """A piece of a log by byte position; a negative offset counts from the end."""
        params = {"source": source, "attempt": attempt, "rank": rank, "offset": offset, "limit": limit}
        return cast(LogText, self._connection.get(_run(run_id, "logs"), params))

    def log_files(self, run_id: str) -> list[LogFile]:
        """Every log that a run has: the newest attempt first, its ranks in order, the supervisors' last."""
        return cast(list[LogFile], self._connection.get(_run(run_id, "logs/files"))["items"])

    def search_logs(
        self,
        run_id: str,
        text: str,
        *,
        source: Literal["trainer", "supervisor"] = "trainer",
        attempt: int | None = None,
        rank: int = 0,
    ) -> Iterator[LogMatch]:
        """Lines of a log that hold a text, upper or lower case, in their order; large logs are read part by part."""
        params = {"search": text, "source": source, "attempt": attempt, "rank": rank}
        offset = 0
        while True:
            path = _run(run_id, "logs/search")
            found = cast(LogMatches, self._connection.get(path, {**params, "offset": offset}))
            yield from found["items"]
            offset = found["next_offset"]
            if offset >= found["size"]:
                return

    # What happens

    def events(self, run_id: str, *, after: int = 0, wait_s: float = 0, limit: int = PAGE) -> EventPage:
        """Events after a sequence number; with `wait_s` an empty answer is held back until something happens."""
        params = {"after": after, "wait": wait_s, "limit": limit}
        return cast(EventPage, self._connection.get(f"/v1/runs/{_part(run_id)}/events", params))

    def follow(self, run_id: str, *, after: int = 0, patience_s: float = PATIENCE_S) -> Iterator[Event]:
        """A run's events in order, each once, until the run ends; a service that restarts meanwhile is waited for.

        Raises:
            UnreachableError: the platform did not answer for `patience_s`.
        """
        return client_waiting.follow(self, run_id, after, patience_s)

    def wait(
        self, run_id: str, *, timeout_s: float | None = None, until: Callable[[RunDetail], bool] = has_ended
    ) -> RunDetail:
        """The run once it has ended, or once `until` it; a service that restarts meanwhile is waited for.

        Raises:
            WaitTimeoutError: it had not after `timeout_s`; it goes on.
            UnreachableError: the platform did not answer for a long time.
        """
        return client_waiting.wait(self, run_id, timeout_s, until)

    # The platform

    def workers(self) -> list[Worker]:
        """All workers known, the freshest sign of life first."""
        return cast(list[Worker], self._connection.get("/v1/workers")["items"])

    def drain(self, worker_id: str) -> Worker:
        """Have a worker take no more runs and put those it has back into the queue, until it is enabled."""
        return cast(Worker, self._connection.once("POST", f"/v1/workers/{_part(worker_id)}/drain"))

    def enable(self, worker_id: str) -> Worker:
        """Let a drained worker take runs again."""
        return cast(Worker, self._connection.once("POST", f"/v1/workers/{_part(worker_id)}/enable"))

    def presets(self) -> list[Preset]:
        """Specs to begin with."""
        return cast(list[Preset], self._connection.get("/v1/spec/presets")["items"])

    def spec_schema(self) -> dict[str, Any]:
        """JSON schema of a run spec."""
        return cast(dict[str, Any], self._connection.get("/v1/spec/schema"))

    def registry(self) -> list[dict[str, Any]]:
        """Every metric's definition."""
        return cast(list[dict[str, Any]], self._connection.get("/v1/metrics/registry")["items"])

    def me(self) -> Me:
        """Whom the platform takes this client for."""
        return cast(Me, self._connection.get("/v1/me"))


def _spec_body(spec: str | Mapping[str, Any]) -> dict[str, Any]:
    return {"spec_yaml": spec} if isinstance(spec, str) else {"spec": dict(spec)}


def _run(run_id: str, what: str) -> str:
    return f"/v1/runs/{_part(run_id)}/{what}"


def _checkpoint(run_id: str, checkpoint_id: str) -> str:
    return f"/v1/runs/{_part(run_id)}/checkpoints/{_part(checkpoint_id)}"


def _part(name: str) -> str:
    """One part of an address, whatever is in it."""
    return quote(name, safe="")
