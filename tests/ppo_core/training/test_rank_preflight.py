"""The checks before the first iteration, made by two ranks of which none holds the whole model."""

from __future__ import annotations

from typing import Any

import pytest

from ppo_core.rundir import SegmentDir
from tests.ppo_core.rank_processes import run_all
from tests.ppo_core.toy_run import journal, make_toy, other_classifier, timeless, toy_segment

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

# Of the machine, of the number of processes, or not to be made at stage 3.
OWN = ("disk", "memory", "meaning", "alignment")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SegmentDir]:
    """One process, and two ranks at stage 3 with and without the checks."""
    folder = tmp_path_factory.mktemp("preflight")
    (folder / "toy").mkdir()
    spec = make_toy(folder / "toy")
    judge = {"kind": "sequence_classifier", "model": str(other_classifier(folder / "judge"))}
    spec |= {"iterations": 1, "preflight": {"enabled": True, "audit_answers": 21}}
    spec["gate"] |= {"judge": judge, "prompts": 64}
    spec["rollout"] |= {"batch_size": 9, "stop_ids": list(range(20, 34))}
    ranks = {"engine": "deepspeed", "ranks": 2, "zero_stage": 3}
    found = {
        "one": toy_segment(folder / "one", spec),
        "two": toy_segment(folder / "two", {**spec, "training": ranks}),
        "unchecked": toy_segment(folder / "unchecked", {**spec, "training": ranks, "preflight": {"enabled": False}}),
    }
    run_all([found["one"]], 1, folder / "alone")
    run_all([found["two"], found["unchecked"]], 2, folder / "together")
    return found


def findings(segment: SegmentDir) -> dict[str, dict[str, Any]]:
    (event,) = journal(segment, "preflight")
    return {finding["check"]: finding for finding in event.payload["findings"]}


def test_two_ranks_find_what_one_process_does(runs: dict[str, SegmentDir]) -> None:
    one, two = findings(runs["one"]), findings(runs["two"])
    assert one.keys() == two.keys()
    numbers = ("engine_parity",)  # of rounding, which differs
    for name in one.keys() - set(OWN) - set(numbers):
        assert two[name] == one[name], name
    assert two["engine_parity"]["status"] == "ok"
    assert two["gate_prompts"]["status"] == "warning"
    assert "tensors read back" in two["checkpoint"]["detail"]
    assert two["alignment"]["detail"] == "not compared with a row alone, since no rank holds the whole model"


def test_the_checks_leave_nothing_and_change_no_number(runs: dict[str, SegmentDir]) -> None:
    checked, unchecked = runs["two"], runs["unchecked"]
    assert not (checked.path / ".preflight").exists()
    assert [timeless(event.payload) for event in journal(checked, "metrics")] == [
        timeless(event.payload) for event in journal(unchecked, "metrics")
    ]
