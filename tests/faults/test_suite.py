"""Every fault of the list once, with the scripted trainer: runs end as they have to, and the checker finds nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.faults import FAULTS, LONG, Fault
from tests.faults.record import keep
from tests.faults.rounds import play_alone, play_beside
from tests.faults.stage import Stage, whole_stage

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

# One phase of each here, by turns; the matrix has them all.
CASES = [(fault, fault.phases[number % len(fault.phases)]) for number, fault in enumerate(FAULTS) if fault.phases]
BESIDE = [(fault, phase) for fault, phase in CASES if not fault.alone]
ALONE = [(fault, [phase]) for fault, phase in CASES if fault.alone and fault.name not in LONG]
ALONE += [(fault, []) for fault in FAULTS if not fault.phases]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with whole_stage(tmp_path_factory.mktemp("stage")) as stage:
        yield stage


def test_faults_of_single_runs_side_by_side(stage: Stage) -> None:
    outcomes = play_beside(stage, BESIDE)
    keep(outcomes, 1)
    assert [outcome for outcome in outcomes if outcome.violations] == []
    assert len(outcomes) == len(BESIDE)


@pytest.mark.parametrize(("fault", "phases"), ALONE, ids=[fault.name for fault, _ in ALONE])
def test_faults_of_services(stage: Stage, fault: Fault, phases: list[str]) -> None:
    outcomes = play_alone(stage, fault, phases)
    keep(outcomes, 1)
    assert [outcome for outcome in outcomes if outcome.violations] == []
    assert {outcome.phase for outcome in outcomes} >= set(phases)
