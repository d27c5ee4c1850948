"""The loop: iterations, evaluations and gates, checkpoints, control, journal. Everything between start and end code."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from safetensors.torch import save_file

from ppo_core.checkpoints import TrainerState, versions, write_checkpoint
from ppo_core.control import Control, Interrupted
from ppo_core.data.prompts import PromptSource
from ppo_core.diagnostics.alerts import Payload, Watch
from ppo_core.diagnostics.iteration_metrics import held_out_metrics, iteration_metrics, peak_memory_gib
from ppo_core.diagnostics.kl_sign import negative_kl_warning
from ppo_core.diagnostics.limit_meter import LimitMeter
from ppo_core.diagnostics.preflight import Preflight
from ppo_core.errors import DataError
from ppo_core.evaluation.gate_state import GateState
from ppo_core.evaluation.held_out import Answers, HeldGate, HeldOut
from ppo_core.iteration import IterationReport, Models, Progress, run_iteration
from ppo_core.rollout.shared import SharedEngine
from ppo_core.rundir import (
    ExitCode,
    Journal,
    SegmentDir,
    all_events,
    checkpoint_before,
    checkpoint_bytes,
    checkpoints,
    write_atomically,
)
from ppo_core.samples import held_out_records, rollout_records
from ppo_core.score_shaping import RunningMoments
from ppo_core.spec import RunSpec
from ppo_core.spec.files import context_length, model_config
from ppo_core.stopwatch import Stopwatch
from ppo_core.training.updates import SkippedStep, SkippedTooOften

# Longest time that a phase may take before whoever follows may call the trainer stalled.
PHASE_DEADLINE_S = 1800.0
# Batches of skipped steps that a segment keeps; one is enough to find most causes, and disks are finite.
MAX_KEPT_SKIPPED = 20
ALERT_HINT = "The alert has its evidence and a way back: see `ppo alerts RUN`, or Alerts on the run's page."


@dataclass(frozen=True)
class Outcome:
    """How a trainer ended: the code it leaves with, and the reason in one word. Where nobody asked for the end, `why`
    says it in a sentence and `hint` what to do."""

    code: ExitCode
    reason: str
    why: str | None = None
    hint: str | None = None


@dataclass(frozen=True)
class Evaluation:
    """What a look at the held-out prompts gave: nothing where none was due."""

    metrics: dict[str, float | None]
    records: list[dict[str, Any]]
    gate: HeldGate | None


class Trainer:
    """One segment of one run, from its first iteration to its end."""

    def __init__(
        self,
        segment: SegmentDir,
        spec: RunSpec,
        models: Models,
        prompts: PromptSource,
        held_out: HeldOut | None,
        tokenizer: Any,
        meter: LimitMeter,
        state: TrainerState,
        journal: Journal,
        control: Control,
    ) -> None:
        self.segment = segment
        self.spec = spec
        self.models = models
        self.prompts = prompts
        self.held_out = held_out
        self.tokenizer = tokenizer
        self.meter = meter
        self.state = state
        self.journal = journal
        self.control = control
        self.ranks = models.ranks
        self.began = time.monotonic()
        self.judge_score: float | None = None
        # Rank 0's watches for all; what it says is told to the others, as times and the like differ between them.
        self.told_alerts: set[tuple[int, str, str]] = set()
        context = context_length(model_config(spec.policy.model))
        self.watch = Watch(spec, state.alerts, lambda iteration: checkpoint_before(segment, iteration), context)

    def train(self) -> Outcome:
        """Run until the goal is reached, the run is asked to end, or a gate or guard trips.

        Raises:
            PPOCoreError: a fault that ends the run as failed.
        """
        self.told_alerts = self._alerts_told_before()
        outcome = self._disobeyed() or self._preflight() or self._owed_evaluation()
        if outcome is not None:
            return outcome
        while self.state.iteration < self.spec.iterations:
            outcome = self._asked_to_end() or self._one_iteration()
            if outcome is not None:
                return outcome
        if self._owes_evaluation():  # A stop came into the last one: the goal is reached when it has been made.
            outcome = self._asked_to_end()
            if outcome is not None:
                return outcome
        if self.state.optimizer_steps == 0:
            raise DataError("all iterations are over and not one optimizer step was applied, so nothing was trained")
        self._save("final")
        self.control.done("checkpoint")
        return Outcome(ExitCode.DONE, "goal")

    def close(self) -> None:
        """End what runs beside the trainer: the processes of engine, scorers and judge, whichever cannot be ended."""
        with contextlib.ExitStack() as stack:
            for each in (self.held_out, self.models.reward, self.models.engine):
                if each is not None:
                    stack.callback(each.close)

    def _preflight(self) -> Outcome | None:
        """The checks before the first iteration of a run, once."""
        if self.state.iteration or not self.spec.preflight.enabled:
            return None
        if self.ranks.first(lambda: any(event.type == "preflight" for event in all_events(self.segment.journal))):
            return None
        self._announce("preflight", 0)
        checks = Preflight(
            self.segment, self.spec, self.models, self.prompts, self.tokenizer, self.control.check, self.held_out
        )
        try:
            findings = checks.findings()
        except Interrupted:
            return self._asked_to_end()
        self.journal.append("preflight", 0, {"findings": [finding.as_dict() for finding in findings]})
        return None

    # One iteration, and what belongs to it

    def _one_iteration(self) -> Outcome | None:
        iteration = self.state.iteration + 1
        self.control.iteration = iteration
        watch = Stopwatch(lambda phase: self._announce(phase, iteration))
        batch = self.prompts.take(self.state.cursor, self.spec.rollout.batch_size)
        progress = Progress(
            iteration,
            self.state.policy_version,
            self.state.kl_coef,
            self.state.skipped_in_a_row,
            RunningMoments.of(self.state.score_moments),
        )
        try:
            report = run_iteration(self.models, batch, self.spec, progress, self.control, watch)
        except Interrupted:
            return self._asked_to_end()
        except SkippedTooOften as error:
            self._keep_skipped(iteration, error.skipped)
            raise
        self._keep_skipped(iteration, report.update.skipped)
        num_failed = report.sampled.num_rows - report.rollout.num_rows
        cursor = self.state.cursor + report.sampled.num_rows
        # Added up, not counted from the cursor: a roll back may have begun another order there.
        num_filtered = self.prompts.num_filtered(cursor) - self.prompts.num_filtered(self.state.cursor)
        self.state = self.state.after(
            iteration=iteration,
            cursor=cursor,
            policy_version=report.sync.version,
            optimizer_steps=self.models.trainer.num_steps,
            skipped_in_a_row=report.update.skipped_in_a_row,
            kl_coef=report.kl_update.coef,
            score_moments=report.scores.moments.as_dict(),
            prompts_trained=self.state.prompts_trained + report.rollout.num_rows,
            prompts_filtered=self.state.prompts_filtered + num_filtered,
            prompts_failed=self.state.prompts_failed + num_failed,
        )
        self.state = self.state.after(evaluation_owed=self._evaluation_due(iteration))
        self.judge_score = None  # It is a policy's own: a checkpoint of this one must not carry the last one's.
        evaluation = self._evaluate(watch)
        peak_gib = max(self.ranks.gather(peak_memory_gib()))
        limit_s = self.meter.limit_s(report)
        own = iteration_metrics(report, self.state, watch.seconds(), limit_s, peak_gib)
        self._tell_gate(iteration, evaluation)
        self.journal.append("metrics", iteration, {**own, **evaluation.metrics})
        warning = negative_kl_warning(report.old.logprobs, report.ref_logprobs, report.rollout.response_mask)
        if warning is not None:
            self.journal.append("note", iteration, {"level": "warning", "message": warning})
        if self.ranks.size > 1:
            self.journal.append("shares", iteration, self._shares(report))
        self._keep_samples(iteration, report)
        if evaluation.records:
            self._write_samples(iteration, "held_out", evaluation.records)
        alerts = self._tell_alerts(iteration, lambda watch: watch.look(iteration, own))
        alerts += self._alerts_of_evaluation(iteration, evaluation)
        return self._after(iteration, alerts)

    def _after(self, iteration: int, alerts: list[Payload]) -> Outcome | None:
        """What follows an iteration: an alert that acts, a checkpoint that is due or was asked for."""
        outcome = self._obey(alerts)
        if outcome is not None:
            return outcome
        due = iteration % self.spec.checkpoints.every == 0 and iteration < self.spec.iterations
        if due or self.control.wants_checkpoint():
            self._save("schedule" if due else "command")
            self.control.done("checkpoint")
        return None

    def _obey(self, alerts: Iterable[Payload]) -> Outcome | None:
        """Save and end where one of these alerts acts."""
        acting = [alert for alert in alerts if alert["status"] != "cleared" and alert["action"] != "note"]
        if not acting:
            return None
        reason = "gate" if any(alert["kind"] == "gate" for alert in acting) else "guard"
        self._save(reason)
        if self.control.wants_checkpoint():
            self.control.done("checkpoint")
        stopping = [alert for alert in acting if alert["action"] == "stop"]
        why = "; ".join(alert["title"] for alert in stopping or acting)
        return Outcome(ExitCode.GATE_OR_GUARD if stopping else ExitCode.PAUSED, reason, why, ALERT_HINT)

    def _asked_to_end(self) -> Outcome | None:
        asked = self.control.wants_to_end()
        if asked is not None:
            self.control.iteration = self.state.iteration  # An iteration that was given up was not reached.
            self._save(asked)
            self.control.done("checkpoint", "pause", "stop")
            return Outcome(ExitCode.STOPPED, "stopped") if asked == "stop" else Outcome(ExitCode.PAUSED, "paused")
        limit = self.spec.resources.max_hours
        if limit is not None and self.ranks.first(self._hours) > limit:
            self._save("guard")
            self.control.done("checkpoint")  # Whoever looked whether to end has seen it.
            why = f"it has trained for resources.max_hours, {limit:g} h"
            return Outcome(ExitCode.GATE_OR_GUARD, "guard", why, "Roll it back to its newest checkpoint with more.")
        return None

    # Alerts

    def _tell_alerts(self, iteration: int, look: Callable[[Watch], Iterable[Payload]]) -> list[Payload]:
        """Journal what rank 0's watch finds, but for what an earlier start of this segment has told already.

        Returns:
            What is new of it.
        """
        found = self.ranks.first(lambda: list(look(self.watch)))
        alerts = [alert for alert in found if (iteration, alert["id"], alert["status"]) not in self.told_alerts]
        for alert in alerts:
            self.told_alerts.add((iteration, alert["id"], alert["status"]))
            self.journal.append("alert", iteration, alert)
        return alerts

    def _alerts_of_evaluation(self, iteration: int, evaluation: Evaluation) -> list[Payload]:
        alerts: list[Payload] = []
        if evaluation.metrics:
            alerts += self._tell_alerts(
                iteration, lambda watch: watch.look_at_evaluation(iteration, evaluation.metrics)
            )
        if evaluation.gate is not None:
            verdict = evaluation.gate.verdict
            rate = verdict.against_last.rate
            alerts += self._tell_alerts(
                iteration, lambda watch: watch.look_at_gate(iteration, verdict.tripped, verdict.explanation, rate)
            )
        return alerts

    def _alerts_told_before(self) -> set[tuple[int, str, str]]:
        def told() -> set[tuple[int, str, str]]:
            events = (event for event in all_events(self.segment.journal) if event.type == "alert")
            return {(event.iteration, event.payload["id"], event.payload["status"]) for event in events}

        return self.ranks.first(told)

    def _disobeyed(self) -> Outcome | None:
        """What alerts asked of an earlier start of this segment that was killed before it had ended by them."""

        def unanswered() -> list[Payload]:
            found: list[Payload] = []
            for event in all_events(self.segment.journal):
                if event.type == "end" and event.payload["reason"] in ("gate", "guard"):
                    found = []
                elif event.type == "alert" and event.iteration == self.state.iteration:
                    found.append(event.payload)
            return found

        self.control.iteration = self.state.iteration
        return self._obey(self.ranks.first(unanswered))

    # Evaluation

    def _evaluation_due(self, iteration: int) -> bool:
        spec = self.spec
        gate_due = spec.gate.judge is not None and iteration % spec.gate.every == 0
        return gate_due or iteration % spec.evaluation.every == 0 or iteration == spec.iterations

    def _owes_evaluation(self) -> bool:
        return self.held_out is not None and self.state.evaluation_owed

    def _owed_evaluation(self) -> Outcome | None:
        """The evaluation of the present iteration, if a stop kept it from being made: the start's is owed to every run.

        Its metrics belong to that iteration, whose own stand in the journal already. Where they do so themselves, an
        earlier start of this segment has made it; it is made again for what is kept in memory, and acted on as far as
        its alerts had not been told.
        """
        iteration = self.state.iteration
        self.control.iteration = iteration
        evaluation = self._evaluate(Stopwatch(lambda phase: self._announce(phase, iteration)))
        if not evaluation.metrics:
            return None
        told = self._journal_has(iteration, evaluation.metrics)
        if not told:
            self._tell_gate(iteration, evaluation)
            self.journal.append("metrics", iteration, evaluation.metrics)
            self._write_samples(iteration, "held_out", evaluation.records)
        alerts = self._alerts_of_evaluation(iteration, evaluation)
        if told:
            return self._obey(alerts)
        return self._after(iteration, alerts) if iteration else None

    def _tell_gate(self, iteration: int, evaluation: Evaluation) -> None:
        """Before the metrics, by which a restart knows that the evaluation was told."""
        if evaluation.gate is not None:
            self.journal.append("gate", iteration, evaluation.gate.as_dict())

    def _journal_has(self, iteration: int, metrics: dict[str, float | None]) -> bool:
        def has() -> bool:
            told = (event for event in all_events(self.segment.journal) if event.type == "metrics")
            return any(event.iteration == iteration and metrics.keys() <= event.payload.keys() for event in told)

        return self.ranks.first(has)

    def _evaluate(self, watch: Stopwatch) -> Evaluation:
        """Answer the held-out prompts if that is owed. A stop does not wait for it: then it stays owed."""
        nothing = Evaluation({}, [], None)
        if self.held_out is None or not self.state.evaluation_owed:
            return nothing
        try:
            with watch.phase("evaluation"):
                answers = self.held_out.answer(self.models.engine, self.control.check)
                gate = self._hold_gate(self.held_out, answers)
        except Interrupted:
            return nothing
        self.judge_score = answers.judge_mean
        metrics = held_out_metrics(answers)
        if gate is not None:
            self.state = self.state.after(gate=gate.state.as_dict())
            metrics |= gate.verdict.metrics()
            if answers.judge_scores is None:  # It only compares: how often it prefers this policy is its score.
                self.judge_score = gate.verdict.against_start.rate
        elif self.state.gate is None:
            self.state = self.state.after(gate=self.held_out.start_gate(answers).as_dict())
        self.state = self.state.after(evaluation_owed=False)
        return Evaluation(metrics, held_out_records(answers, self.models.decode, gate), gate)

    def _hold_gate(self, held_out: HeldOut, answers: Answers) -> HeldGate | None:
        """The gate of this iteration, where one is due and there is something to compare with."""
        due = self.state.iteration % self.spec.gate.every == 0
        if self.state.gate is None or not due or not held_out.has_judge:
            return None
        return held_out.hold_gate(GateState.of(self.state.gate), answers, self.control.check)

    # Journal, samples, checkpoints

    def _announce(self, phase: str, iteration: int) -> None:
        self.journal.append("phase", iteration, {"phase": phase, "deadline_s": PHASE_DEADLINE_S})

    def _shares(self, report: IterationReport) -> dict[str, Any]:
        """Which prompts each rank answered, and how many tokens it had in the pass that made old logprobs."""
        indices, engine = report.sampled.prompt_indices, self.models.engine
        assert isinstance(engine, SharedEngine)
        rows = [engine.rows_of(rank, len(indices)) for rank in range(self.ranks.size)]
        plan = report.old.plan
        tokens = [
            sum(int(part.mask.count_nonzero()) for part in plan[rank :: self.ranks.size])
            for rank in range(self.ranks.size)
        ]
        return {"prompts": [[indices[row] for row in own] for own in rows], "response_tokens": tokens}

    def _keep_samples(self, iteration: int, report: IterationReport) -> None:
        if self.spec.samples.per_iteration and iteration % self.spec.samples.every == 0:
            records = rollout_records(report, self.models, self.spec.samples.per_iteration)
            self._write_samples(iteration, "train", records)

    def _keep_skipped(self, iteration: int, skipped: Sequence[SkippedStep]) -> None:
        """Say of each skipped step where its batch lies; the first ones of a segment are kept to be looked into."""
        for step in skipped if self.ranks.is_first else ():
            self.segment.skipped.mkdir(exist_ok=True)
            path = self.segment.skipped / f"iter-{iteration:06d}-epoch-{step.epoch}-step-{step.step}.safetensors"
            kept = sum(1 for _ in self.segment.skipped.iterdir()) < MAX_KEPT_SKIPPED
            if kept:
                save_file({name: tensor.contiguous() for name, tensor in step.tensors.items()}, path)
            message = (
                f"epoch {step.epoch}, optimizer step {step.step} was skipped: policy loss {step.policy_loss:.4g}, "
                f"value loss {step.value_loss:.4g}, gradient norm {step.grad_norm:.4g}"
                + (f"; its batch is {path.relative_to(self.segment.path)}" if kept else "")
            )
            self.journal.append("note", iteration, {"level": "warning", "message": message})

    def _write_samples(self, iteration: int, kind: str, records: list[dict[str, Any]]) -> None:
        if not self.ranks.is_first:
            return
        path = self.segment.samples / f"iter-{iteration:06d}-{kind}.jsonl"
        # Texts may hold lone surrogates, which only an escape can carry; numbers are finite or null.
        write_atomically(path, "".join(json.dumps(_strict(record), ensure_ascii=True) + "\n" for record in records))
        relative = path.relative_to(self.segment.path).as_posix()
        self.journal.append("samples", iteration, {"path": relative, "num": len(records)})

    def _save(self, reason: str) -> None:
        """Write a checkpoint of this moment, unless there is one."""
        iteration = self.state.iteration
        target = self.segment.checkpoint(iteration)
        if self.ranks.first(target.exists):
            return
        self._announce("saving", iteration)
        if self.ranks.is_first:
            self._tell_little_space(iteration)
        self.state = self.state.after(hours=self.ranks.first(self._hours), alerts=self.ranks.first(self.watch.as_dict))
        self.began = time.monotonic()
        digest = write_checkpoint(target, self.models.trainer, self.tokenizer, self.state, self.spec, self.ranks)
        self.journal.append(
            "checkpoint",
            iteration,
            {
                "path": target.relative_to(self.segment.path).as_posix(),
                "bytes": self.ranks.first(lambda: checkpoint_bytes(target)),
                "manifest_sha256": digest,
                "reason": reason,
                "judge_score": self.judge_score,
            },
        )

    def _tell_little_space(self, iteration: int) -> None:
        """A note where the disk has less room than the last checkpoint took: the save is tried all the same."""
        earlier = checkpoints(self.segment)
        needed = checkpoint_bytes(earlier[-1]) if earlier else 0
        free = shutil.disk_usage(self.segment.checkpoints).free
        if free < needed:
            message = (
                f"{free / 2**20:.0f} MiB are free in {self.segment.checkpoints}, and the last checkpoint took "
                f"{needed / 2**20:.0f} MiB: free space, or this one may not be written and the run pauses"
            )
            self.journal.append("note", iteration, {"level": "warning", "message": message})

    def _hours(self) -> float:
        return self.state.hours + (time.monotonic() - self.began) / 3600


def started_payload(pid: int, attempt: int, token: int, resumed_from: str | None, first: int) -> dict[str, Any]:
    """The payload of a `started` event."""
    return {
        "pid": pid,
        "attempt": attempt,
        "token": token,
        "resumed_from": resumed_from,
        "first_iteration": first,
        "versions": versions(),
    }


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_strict(item) for item in value]
    return value
