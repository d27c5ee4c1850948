"""What a roll back or a fork would be: the checkpoint looked at, the new spec checked, every change named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from api.checkpoint_messages import checkpoint_message, no_checkpoint, reading, reasons_to_stay
from api.errors import ProblemError
from api.lineage_schemas import Change, ForkPreview, LeftBehind, RollbackPreview
from api.schemas import Checkpoint, FaultMessage, SpecBody
from api.settings import ApiSettings
from api.specs import accept_spec, spec_fields, spec_yaml
from ppo_core.errors import CheckpointError
from ppo_core.estimate import estimate
from ppo_core.rundir import look_at_checkpoint
from ppo_core.spec import (
    Fault,
    RunSpec,
    SpecFaults,
    apply_settings,
    changeable,
    differences,
    misfits_with_checkpoint,
    pointer_of,
    refusals,
    repeats,
    too_few_iterations,
    with_defaults,
)
from store import lineage, run_read
from store.checkpoints import record_verification
from store.models import Checkpoint as CheckpointRow
from store.models import Segment
from store.rollback import TargetUnusable, usable


@dataclass(frozen=True)
class Plan:
    """A new segment that may begin: where from, and with which spec. Rows in it belong to no session any more."""

    run_name: str
    target: CheckpointRow
    sent_target: Checkpoint
    at_checkpoint: dict[str, Any]
    now: dict[str, Any]
    spec: RunSpec
    left_behind: lineage.LeftBehind | None

    @property
    def then(self) -> dict[str, Any]:
        return spec_fields(self.spec)


def plan(
    database: Session,
    settings: ApiSettings,
    run_id: str,
    checkpoint_id: str,
    changes: Mapping[str, Any],
    *,
    fork: bool,
    name: str | None = None,
) -> Plan:
    """Look at the checkpoint, and check the spec as a submitted one is; no transaction is open while files are read.

    Raises:
        RunNotFound
        ProblemError: no such checkpoint, or one that is not whole.
        SpecFaults: every fault of the settings at once.
    """
    run = run_read.known_run(database, run_id)
    target = _target(database, settings.data_dir, run_id, checkpoint_id)
    at_checkpoint = with_defaults(database.get_one(Segment, (run_id, target.segment)).spec)
    now = with_defaults(run_read.active_spec(database, run))
    behind = None if fork else lineage.left_behind(database, run, target)
    sent = checkpoint_message(target, reasons_to_stay(database, run).get(target.id, ()))
    database.expunge_all()
    database.rollback()  # The spec names files, too.
    spec = _checked(at_checkpoint, changes, settings, target.iteration, fork=fork, name=name)
    return Plan(run.name, target, sent, at_checkpoint, now, spec, behind)


def fork_preview(plan: Plan) -> ForkPreview:
    """What `plan` means as a fork."""
    return ForkPreview(**_preview(plan))


def rollback_preview(plan: Plan) -> RollbackPreview:
    """What `plan` means as a roll back."""
    behind = plan.left_behind
    return RollbackPreview(
        **_preview(plan),
        left_behind=None if behind is None else LeftBehind.model_validate(behind),
        repeats_exactly=_repeats_exactly(plan),
    )


def _target(database: Session, data_dir: Path, run_id: str, checkpoint_id: str) -> CheckpointRow:
    target = database.get(CheckpointRow, checkpoint_id)
    if target is None:
        raise no_checkpoint(run_id, checkpoint_id)
    if target.run_id != run_id:
        message = f"checkpoint {target.id} belongs to run {target.run_id}, not to this one: fork it there instead"
        raise ProblemError(
            422,
            "bad_request",
            "The request is not valid.",
            errors=[FaultMessage(pointer="/checkpoint", message=message)],
        )
    try:
        usable(target, checkpoint_id)
    except TargetUnusable as error:
        raise ProblemError(409, error.code, str(error)) from error
    try:
        with reading(database, checkpoint_id):
            look_at_checkpoint(data_dir / "runs" / run_id, target.path, target.manifest_sha256)
    except CheckpointError as error:
        record_verification(database, run_id, target.id, str(error))
        database.commit()
        detail = f"Checkpoint {target.id} is damaged: {error}. The run goes on untouched; choose another checkpoint."
        raise ProblemError(409, "checkpoint_damaged", detail) from error
    return target


def _checked(
    base: dict[str, Any],
    changes: Mapping[str, Any],
    settings: ApiSettings,
    iteration: int,
    *,
    fork: bool,
    name: str | None,
) -> RunSpec:
    data = apply_settings(base, changes)
    refused = refusals(differences(base, data), changes, fork=fork)
    if fork and name is not None and not any(fault.pointer == "/set/name" for fault in refused):
        data["name"] = name
    try:
        spec = accept_spec(SpecBody(spec=data), settings.roots, settings.reward_hosts, settings.engine_hosts)
    except SpecFaults as error:
        found = [
            Fault(pointer_of(fault.pointer[1:].replace("/", "."), changes) if fault.pointer else "", fault.message)
            for fault in error.faults
        ]
        told = {fault.pointer for fault in found}
        raise SpecFaults([*found, *(fault for fault in refused if fault.pointer not in told)]) from error
    for pointer, message in misfits_with_checkpoint(spec, base).items():  # Else the trainer would find them, later.
        refused.append(Fault(pointer_of(pointer[1:].replace("/", "."), changes), message))
    too_few = too_few_iterations(spec.iterations, iteration)
    if too_few is not None:
        refused.append(Fault("/set/iterations", too_few))
    if refused:
        raise SpecFaults(refused)
    return spec


def _preview(plan: Plan) -> dict[str, Any]:
    found = estimate(plan.spec, start_iteration=plan.target.iteration)
    warnings = list(found.warnings)
    if plan.spec.iterations == plan.target.iteration:
        warnings.append(
            f"Nothing is left to train: the checkpoint was made after iteration {plan.target.iteration}, the last one. "
            "The run will end at once; set iterations higher to train on."
        )
    return {
        "checkpoint": plan.sent_target,
        "spec": plan.then,
        "spec_yaml": spec_yaml(plan.then),
        "changes": _three_way(plan.at_checkpoint, plan.now, plan.then),
        "warnings": warnings,
        "estimate": found.as_dict(),
        "meaning": list(found.news),
    }


def _three_way(at_checkpoint: dict[str, Any], now: dict[str, Any], then: dict[str, Any]) -> list[Change]:
    pairs = ((at_checkpoint, now), (now, then), (at_checkpoint, then))
    paths = dict.fromkeys(change.path for one, other in pairs for change in differences(one, other))
    outermost = [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]
    return [
        Change(
            path=path,
            at_checkpoint=_value(at_checkpoint, path),
            now=_value(now, path),
            then=_value(then, path),
            changeable=changeable(path),
        )
        for path in outermost
    ]


def _value(spec: Any, path: str) -> Any:
    for part in path.split("."):
        if isinstance(spec, list) and part.isdecimal() and int(part) < len(spec):
            spec = spec[int(part)]
        elif isinstance(spec, Mapping):
            spec = spec.get(part)
        else:
            return None
    return spec


def _repeats_exactly(plan: Plan) -> bool:
    """On one processor in float32 with the transformers engine; elsewhere last digits may differ."""
    spec = plan.spec
    exact = spec.rollout.engine == "transformers" and spec.policy.dtype == "float32" and spec.resources.gpus == 0
    return exact and repeats(plan.at_checkpoint, plan.then)
