"""Every fault in every phase five times with the scripted trainer, and once with the real one: hours.

With PPO_FAULT_OUTCOMES the outcomes are kept, and what was seen already is not played again (`record`), so that it may
be broken off. `python -m tests.faults.report` makes the table of those in `outcomes.jsonl`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.faults.faults import FAULTS, Fault
from tests.faults.record import keep, unseen_phases
from tests.faults.rounds import Outcome, play_alone, play_beside, play_real
from tests.faults.stage import EITHER_TRAINER, Stage, whole_stage
from tests.ppo_core.toy_run import make_toy

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(900)]

REPETITIONS = range(1, 6)
BESIDE = [fault for fault in FAULTS if not fault.alone]
ALONE = [fault for fault in FAULTS if fault.alone]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with whole_stage(tmp_path_factory.mktemp("matrix")) as stage:
        yield stage


@pytest.fixture(scope="module")
def real_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with whole_stage(tmp_path_factory.mktemp("real"), PPO_TRAINER_COMMAND=EITHER_TRAINER, OMP_NUM_THREADS="1") as stage:
        yield stage


def _check(outcomes: Sequence[Outcome], repetition: int) -> None:
    keep(outcomes, repetition)
    assert [outcome for outcome in outcomes if outcome.violations] == []


@pytest.mark.parametrize("repetition", REPETITIONS)
@pytest.mark.parametrize("phase", range(3))
def test_single_runs(stage: Stage, phase: int, repetition: int) -> None:
    cases = [(fault, fault.phases[phase]) for fault in BESIDE]
    to_do = [(fault, name) for fault, name in cases if name in unseen_phases(fault, "scripted", repetition)]
    if to_do:
        _check(play_beside(stage, to_do), repetition)


@pytest.mark.parametrize("repetition", REPETITIONS)
@pytest.mark.parametrize("fault", ALONE, ids=lambda fault: fault.name)
def test_services(stage: Stage, fault: Fault, repetition: int) -> None:
    to_do = unseen_phases(fault, "scripted", repetition)
    if to_do:
        _check(play_alone(stage, fault, [phase for phase in to_do if phase in fault.phases]), repetition)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    spec = make_toy(tmp_path_factory.mktemp("toy"))
    return {**spec, "iterations": 60, "gate": {"every": 60, "prompts": 2}, "evaluation": {"every": 60, "prompts": 2}}


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.real], ids=lambda fault: fault.name)
def test_the_real_trainer(real_stage: Stage, fault: Fault, toy: dict[str, Any]) -> None:
    if unseen_phases(fault, "real", 1):
        _check(play_real(real_stage, fault, toy | {"iterations": 2000 if fault.deadline_s > 120 else 60}), 1)
