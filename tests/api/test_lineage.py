"""Segments and lineage over REST: where a run has been, and the family that it belongs to."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from store import lineage
from store.models import Run, RunIteration, Segment
from tests.api.trained_run import Trained


def test_segments_say_where_they_stand_on_the_active_line(trained: Trained) -> None:
    target = trained.save(20)
    with trained.sessions.begin() as session:
        spec = session.get_one(Segment, (trained.id, 1)).spec
        changed = {**spec, "kl": {**spec["kl"], "coef": 0.1}}
        session.add(
            Segment(
                run_id=trained.id,
                number=2,
                kind="rollback",
                spec=changed,
                start_iteration=20,
                start_checkpoint=target,
                created_by="ada",
                reason="why not",
            )
        )
        for number in (21, 22):
            session.add(RunIteration(run_id=trained.id, segment=2, iteration=number, time="2030-01-01T00:00:00Z"))
        session.execute(update(Run).where(Run.id == trained.id).values(active_segment=2, iteration=22))
    first, second = trained.operator.get(f"/v1/runs/{trained.id}/segments").json()["items"]
    assert (first["active"], first["last_iteration"], first["on_active_line"]) == (False, 30, [1, 20])
    assert (second["active"], second["last_iteration"], second["on_active_line"]) == (True, 22, [21, 22])
    assert second["started_from"] == {"run_id": trained.id, "segment": 1, "iteration": 20}
    assert second["changes"] == [{"path": "kl.coef", "before": 0.05, "after": 0.1}]
    detail = trained.operator.get(f"/v1/runs/{trained.id}/segments/2").json()
    assert detail["spec"]["kl"]["coef"] == 0.1
    assert "coef: 0.1" in detail["spec_yaml"]
    assert trained.operator.get(f"/v1/runs/{trained.id}/segments/3").status_code == 404
    assert trained.operator.get("/v1/runs/r-no/segments").status_code == 404


def test_segments_come_in_pages(trained: Trained) -> None:
    with trained.sessions.begin() as session:
        for number in (2, 3):
            session.add(Segment(run_id=trained.id, number=number, kind="recovery", spec={}))
    address = f"/v1/runs/{trained.id}/segments"
    first = trained.operator.get(address, params={"limit": 2}).json()
    rest = trained.operator.get(address, params={"limit": 2, "cursor": first["next"]}).json()
    numbers = [item["number"] for page in (first, rest) for item in page["items"]]
    assert (numbers, rest["next"]) == ([1, 2, 3], None)


def test_lineage_holds_ancestors_and_descendants_once(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    target = trained.save(20)
    child = trained.fork(target).json()["id"]
    sibling = trained.fork(target).json()["id"]
    young = Trained(trained.operator, trained.sessions, trained.run_dir.parent / child, child)
    grandchild = young.fork(young.save(40)).json()["id"]

    def family(run_id: str) -> list[str]:
        return [run["id"] for run in trained.operator.get(f"/v1/runs/{run_id}/lineage").json()["runs"]]

    assert family(trained.id) == [trained.id, child, sibling, grandchild]
    assert family(child) == [trained.id, child, grandchild]
    assert family(grandchild) == [trained.id, child, grandchild]
    assert family(sibling) == [trained.id, sibling]
    assert trained.operator.get("/v1/runs/r-no/lineage").status_code == 404
    assert trained.operator.get(f"/v1/runs/{trained.id}/lineage").json()["complete"] is True
    monkeypatch.setattr(lineage, "MOST_MEMBERS", 3)
    assert family(trained.id) == [trained.id, child, sibling], "a fork of a fork is left out first"
    assert family(grandchild) == [trained.id, child, grandchild]
    assert trained.operator.get(f"/v1/runs/{trained.id}/lineage").json()["complete"] is False
