"""Checkpoints over REST: what stays and why, pins and names, deletion, comparison with the manifest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.orm import Session, sessionmaker
from starlette.testclient import TestClient

from api import going_back
from api.routes import checkpoints as routes
from api.settings import ApiSettings
from ppo_core.errors import CheckpointError
from store import retention
from store.events import append_event
from store.metrics_write import IterationMetrics, write_metrics
from store.models import AuditEntry, Checkpoint, Command, Run, RunEvent, Segment
from store.runs import transition
from tests.api.checkpoint_files import SavedRun

NOW = datetime(2026, 11, 1, tzinfo=UTC)


@pytest.fixture
def saved(settings: ApiSettings, sessions: sessionmaker[Session], make_run: Callable[..., str]) -> SavedRun:
    """A run that keeps two, with verified checkpoints at 10, 20, 30 and 40."""
    run_id = make_run(spec={"checkpoints": {"every": 10, "keep_last": 2, "keep_best": 0}})
    run = SavedRun(sessions, settings.data_dir / "runs" / run_id, run_id)
    for iteration in (10, 20, 30, 40):
        run.save(iteration, verified_at=NOW)
    return run


def address(run: SavedRun, iteration: int, rest: str = "") -> str:
    return f"/v1/runs/{run.run_id}/checkpoints/k-{run.run_id}-1-{iteration}{rest}"


def etag(client: TestClient, run: SavedRun, iteration: int) -> str:
    answer = client.get(address(run, iteration))
    assert answer.status_code == 200
    assert answer.headers["ETag"] == answer.json()["etag"]
    return answer.headers["ETag"]


def delete(client: TestClient, run: SavedRun, iteration: int) -> Any:
    return client.delete(address(run, iteration), headers={"If-Match": etag(client, run, iteration)})


def change(client: TestClient, run: SavedRun, iteration: int, **fields: object) -> Any:
    return client.patch(address(run, iteration), json=fields, headers={"If-Match": etag(client, run, iteration)})


def open_transactions(sessions: sessionmaker[Session]) -> int:
    """How many sessions of the database stand still in a transaction."""
    idle = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'"
    with sessions() as session:
        return int(session.scalar(text(idle)) or 0)


def events(run: SavedRun) -> list[RunEvent]:
    with run.sessions() as session:
        rows = session.scalars(
            select(RunEvent).where(RunEvent.run_id == run.run_id, RunEvent.type == "checkpoint").order_by(RunEvent.seq)
        )
        return list(rows)


def audited(run: SavedRun) -> list[str]:
    with run.sessions() as session:
        rows = session.scalars(
            select(AuditEntry.action).where(AuditEntry.detail["run"].astext == run.run_id).order_by(AuditEntry.id)
        )
        return list(rows)


# What stays


def test_each_is_listed_with_the_reasons_for_which_it_stays(viewer: TestClient, saved: SavedRun) -> None:
    items = viewer.get(f"/v1/runs/{saved.run_id}/checkpoints").json()["items"]
    assert {item["iteration"]: item["protected"] for item in items} == {
        10: [],
        20: [],
        30: ["one of the last 2"],
        40: ["the newest verified checkpoint", "one of the last 2"],
    }
    assert {item["verified_at"] for item in items} == {"2026-11-01T00:00:00.000Z"}


def test_the_list_comes_in_pages(viewer: TestClient, saved: SavedRun) -> None:
    address = f"/v1/runs/{saved.run_id}/checkpoints"
    whole = viewer.get(address).json()["items"]
    pages, cursor = [], None
    while cursor is not None or not pages:
        page = viewer.get(address, params={"limit": 1} | ({"cursor": cursor} if cursor else {})).json()
        pages.append(page["items"])
        cursor = page["next"]
    assert len(pages) == len(whole) > 2
    assert [item for page in pages for item in page] == whole
    assert viewer.get(address, params={"cursor": "junk"}).status_code == 422


def test_a_preview_says_what_would_go_under_the_runs_rules_and_under_others(
    viewer: TestClient, saved: SavedRun
) -> None:
    def going(**rules: int) -> list[int]:
        preview = viewer.get(f"/v1/runs/{saved.run_id}/checkpoints:gc-preview", params=rules).json()
        gone = [item for item in preview["items"] if not item["stays"]]
        assert preview["freed_bytes"] == sum(item["bytes"] for item in gone)
        assert all(item["reasons"] for item in preview["items"])
        return [item["iteration"] for item in gone]

    assert going() == [20, 10]
    assert going(keep_last=1) == [30, 20, 10]
    assert going(keep_last=1, keep_every=20) == [30, 10]
    assert going(keep_last=-1) == []
    bad = viewer.get(f"/v1/runs/{saved.run_id}/checkpoints:gc-preview", params={"keep_last": 0})
    assert bad.status_code == 422
    assert "keep_last is 0" in bad.json()["detail"]
    assert viewer.get("/v1/runs/r-none/checkpoints:gc-preview").status_code == 404


def test_a_checkpoint_may_come_while_a_preview_is_made(
    viewer: TestClient, saved: SavedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decide(*arguments: Any, **options: Any) -> Any:
        saved.save(50)
        return decide_as_ever(*arguments, **options)

    decide_as_ever = retention.decide
    monkeypatch.setattr(retention, "decide", decide)
    answer = viewer.get(f"/v1/runs/{saved.run_id}/checkpoints:gc-preview")
    assert answer.status_code == 200
    assert [item["iteration"] for item in answer.json()["items"]] == [50, 40, 30, 20, 10]


def test_gates_starts_and_open_roll_backs_keep_theirs(
    viewer: TestClient, operator: TestClient, saved: SavedRun, make_run: Callable[..., str]
) -> None:
    """P17: nobody removes what a gate, a segment, a fork or a roll back under way needs, by rule or by hand."""
    saved.save(50, verified_at=NOW)
    child = make_run()
    ids = {iteration: f"k-{saved.run_id}-1-{iteration}" for iteration in (10, 20, 30, 40, 50)}
    with saved.sessions.begin() as session:
        gates = [IterationMetrics(gate, NOW, {"judge/win_rate": None if gate == 15 else 0.6}) for gate in (5, 15, 45)]
        write_metrics(session, saved.run_id, 1, gates, active=True)
        session.add(Segment(run_id=child, number=2, kind="fork", spec={}, start_checkpoint=ids[20]))
        for number in (2, 3):
            session.add(Segment(run_id=saved.run_id, number=number, kind="recovery", spec={}, start_checkpoint=ids[20]))
        session.add(
            Command(id=f"c-{saved.run_id}", run_id=saved.run_id, kind="rollback", payload={"checkpoint": ids[30]},
                    deadline_at=NOW)
        )  # fmt: skip
    preview = viewer.get(f"/v1/runs/{saved.run_id}/checkpoints:gc-preview", params={"keep_last": 1}).json()
    assert {item["iteration"]: item["reasons"] for item in preview["items"]} == {
        50: ["the newest verified checkpoint", "one of the last 1"],
        40: ["the newest at the gate of iteration 45"],
        30: [f"roll back c-{saved.run_id} starts from it"],
        20: [f"segments 2 and 3 start from it; run {child} starts from it"],
        10: ["the newest at the gate of iteration 15"],
    }
    for iteration in (10, 20, 30, 40, 50):
        refused = delete(operator, saved, iteration)
        assert (refused.status_code, refused.json()["code"]) == (409, "checkpoint_needed"), iteration
    assert f"run {child} starts from it" in delete(operator, saved, 20).json()["detail"]


def test_what_a_live_trainer_loaded_stays(operator: TestClient, saved: SavedRun) -> None:
    with saved.sessions.begin() as session:
        transition(session, saved.run_id, "starting", lease_token=7)
        transition(session, saved.run_id, "running")
        loaded = {"token": 7, "resumed_from": str(saved.folder(20))}
        append_event(session, saved.run_id, "started", loaded, segment=1, iteration=20)
    refused = delete(operator, saved, 20)
    assert refused.status_code == 409
    assert "the running trainer has loaded it" in refused.json()["detail"]
    with saved.sessions.begin() as session:
        transition(session, saved.run_id, "failed")
    assert delete(operator, saved, 20).status_code == 204


# Pins and names


def test_a_pinned_one_stays_until_the_pin_is_taken_away(operator: TestClient, saved: SavedRun) -> None:
    answer = change(operator, saved, 10, pinned=True, label="before the slump")
    assert answer.status_code == 200
    assert (answer.json()["pinned"], answer.json()["label"]) == (True, "before the slump")
    assert answer.json()["protected"] == ["pinned"]
    assert answer.headers["ETag"] == answer.json()["etag"]
    refused = delete(operator, saved, 10)
    assert refused.status_code == 409
    assert "take the pin away first" in refused.json()["detail"]
    assert change(operator, saved, 10, pinned=False).json()["label"] == "before the slump"
    assert change(operator, saved, 10, label=None).json()["label"] is None
    assert delete(operator, saved, 10).status_code == 204
    told = [(event.payload["change"], event.actor) for event in events(saved)]
    assert told == [(word, "the operator") for word in ("labelled and pinned", "unpinned", "labelled", "removed")]
    assert audited(saved) == ["checkpoint.change"] * 3 + ["checkpoint.delete"]


def test_what_changes_nothing_leaves_no_trace(operator: TestClient, saved: SavedRun) -> None:
    assert change(operator, saved, 10, pinned=False).status_code == 200
    assert (events(saved), audited(saved)) == ([], [])


@pytest.mark.parametrize(
    "fields", [{}, {"pinned": None}, {"pinned": 1.5}, {"label": "x" * 201}, {"label": "a\nb"}, {"path": "/etc"}]
)
def test_a_change_that_is_none_is_refused(operator: TestClient, saved: SavedRun, fields: dict[str, object]) -> None:
    assert change(operator, saved, 10, **fields).status_code == 422


def test_who_has_not_seen_the_present_state_changes_nothing(
    operator: TestClient, viewer: TestClient, saved: SavedRun
) -> None:
    seen = etag(operator, saved, 10)
    for request in (
        lambda headers: operator.patch(address(saved, 10), json={"pinned": True}, headers=headers),
        lambda headers: operator.delete(address(saved, 10), headers=headers),
    ):
        assert request({}).status_code == 428
        assert request({"If-Match": '"something else"'}).status_code == 412
    assert change(operator, saved, 10, pinned=True).status_code == 200
    stale = operator.delete(address(saved, 10), headers={"If-Match": seen})
    assert (stale.status_code, stale.json()["code"]) == (412, "if_match_stale")
    assert change(viewer, saved, 10, pinned=False).status_code == 403
    assert delete(viewer, saved, 20).status_code == 403
    listed = f'"x", {etag(operator, saved, 10)}'
    assert operator.patch(address(saved, 10), json={"pinned": False}, headers={"If-Match": listed}).status_code == 200
    assert operator.patch(address(saved, 10), json={"pinned": True}, headers={"If-Match": "*"}).status_code == 200


# Deletion


def test_a_person_may_overrule_keep_last_but_not_take_the_newest_good_one(
    operator: TestClient, saved: SavedRun
) -> None:
    assert delete(operator, saved, 30).status_code == 204
    gone = operator.get(address(saved, 30)).json()
    assert (gone["status"], gone["status_detail"], gone["protected"]) == ("removed", "deleted by the operator", [])
    assert delete(operator, saved, 30).status_code == 204, "a second time is no error"
    assert len(events(saved)) == 1
    refused = delete(operator, saved, 40)
    assert refused.status_code == 409
    assert "the newest verified checkpoint" in refused.json()["detail"]


def test_before_a_newer_one_is_verified_only_a_damaged_one_can_be_deleted(
    operator: TestClient, saved: SavedRun
) -> None:
    with saved.sessions.begin() as session:
        session.execute(update(Checkpoint).where(Checkpoint.run_id == saved.run_id).values(verified_at=None))
        session.execute(update(Checkpoint).where(Checkpoint.id == f"k-{saved.run_id}-1-40").values(status="damaged"))
    refused = delete(operator, saved, 10)
    assert refused.status_code == 409
    assert "no newer checkpoint has been verified yet" in refused.json()["detail"]
    assert delete(operator, saved, 40).status_code == 204
    assert operator.post(address(saved, 30, "/verify")).json()["ok"]
    assert delete(operator, saved, 10).status_code == 204


def test_a_removed_one_takes_no_change_and_is_not_sent(operator: TestClient, saved: SavedRun) -> None:
    delete(operator, saved, 10)
    for answer in (
        change(operator, saved, 10, pinned=True),
        operator.post(address(saved, 10, "/verify")),
        operator.get(address(saved, 10, "/download")),
    ):
        assert (answer.status_code, answer.json()["code"]) == (410, "checkpoint_removed")
        assert "deleted by the operator" in answer.json()["detail"]


# Comparison with the manifest


def _cut(folder: Path) -> None:
    with (folder / "policy" / "model.safetensors").open("r+b") as file:
        file.truncate(69_999)


def _flip(folder: Path) -> None:
    with (folder / "policy" / "model.safetensors").open("r+b") as file:
        file.seek(35_000)
        file.write(b"\xff")


def _take_away(folder: Path) -> None:
    (folder / "state.json").unlink()


def _other_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"format": 1', '"format":  1'))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (_cut, "model.safetensors has 69999 bytes, its manifest says 70000"),
        (_flip, "model.safetensors has SHA-256"),
        (_take_away, "state.json is missing"),
        (_other_manifest, "manifest.json has SHA-256"),
    ],
)
def test_a_damaged_one_is_found_named_and_not_sent(
    operator: TestClient, saved: SavedRun, harm: Callable[[Path], None], words: str
) -> None:
    """P16: a byte cut off, a flipped one, a missing file, another manifest."""
    whole = operator.post(address(saved, 20, "/verify")).json()
    assert (whole["ok"], whole["status"], whole["files"], whole["detail"]) == (True, "good", 4, None)
    harm(saved.folder(20))
    found = operator.post(address(saved, 20, "/verify")).json()
    assert (found["ok"], found["status"]) == (False, "damaged")
    assert words in found["detail"]
    row = operator.get(address(saved, 20)).json()
    assert (row["status"], row["status_detail"]) == ("damaged", found["detail"])
    refused = operator.get(address(saved, 20, "/download"))
    assert (refused.status_code, refused.json()["code"]) == (409, "checkpoint_damaged")
    assert words in refused.json()["detail"]
    assert [event.payload["change"] for event in events(saved)] == ["verified", "damaged"]
    assert audited(saved) == ["checkpoint.verify"] * 2


@pytest.mark.parametrize("what", ["/verify", "/download"])
def test_a_disk_that_is_away_says_nothing_of_a_checkpoint(operator: TestClient, saved: SavedRun, what: str) -> None:
    saved.run_dir.rename(saved.run_dir.with_name("aside"))
    answer = operator.request("POST" if what == "/verify" else "GET", address(saved, 20, what))
    assert (answer.status_code, answer.json()["code"]) == (503, "storage_unreadable")
    saved.run_dir.with_name("aside").rename(saved.run_dir)
    assert operator.get(address(saved, 20)).json()["status"] == "good"


def test_one_that_was_mended_is_good_again(operator: TestClient, saved: SavedRun) -> None:
    path = saved.folder(20) / "state.json"
    text = path.read_text()
    path.unlink()
    assert not operator.post(address(saved, 20, "/verify")).json()["ok"]
    path.write_text(text)
    assert operator.post(address(saved, 20, "/verify")).json()["ok"]
    row = operator.get(address(saved, 20)).json()
    assert (row["status"], row["status_detail"]) == ("good", None)


def test_comparing_many_at_once_leaves_threads_for_everybody_else(
    operator: TestClient, saved: SavedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P28: a comparison takes minutes; beyond four at a time the answer is 503, at once."""
    begun, may_end = threading.Semaphore(0), threading.Event()

    def slow(*_: object) -> tuple[int, int]:
        begun.release()
        assert may_end.wait(30)
        return 4, 100

    monkeypatch.setattr(routes, "check_stored", slow)
    with ThreadPoolExecutor(routes.MOST_COMPARED) as pool:
        running = [pool.submit(operator.post, address(saved, 20, "/verify")) for _ in range(routes.MOST_COMPARED)]
        for _ in running:
            assert begun.acquire(timeout=30)
        busy = operator.post(address(saved, 30, "/verify"))
        may_end.set()
        assert [answer.result().status_code for answer in running] == [200] * routes.MOST_COMPARED
    assert (busy.status_code, busy.json()["code"], busy.headers["Retry-After"]) == (503, "busy", "30")
    assert operator.post(address(saved, 30, "/verify")).status_code == 200


def test_no_transaction_is_open_while_files_are_read(
    operator: TestClient, saved: SavedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database ends a session that stands still in one for a minute; comparing may take longer."""
    seen: list[int] = []

    def look(*_: object) -> None:
        seen.append(open_transactions(saved.sessions))
        raise CheckpointError("looked at")

    monkeypatch.setattr(routes, "check_stored", look)
    monkeypatch.setattr(routes, "open_archive", look)
    monkeypatch.setattr(going_back, "look_at_checkpoint", look)
    back = {"checkpoint": f"k-{saved.run_id}-1-40"}
    answers = [
        operator.post(address(saved, 20, "/verify")),
        operator.get(address(saved, 30, "/download")),
        operator.post(f"/v1/runs/{saved.run_id}/rollback?dry_run=true", json=back),
    ]
    assert ["looked at" in answer.text for answer in answers] == [True] * 3
    assert seen == [0, 0, 0]


@pytest.mark.parametrize("path", ["../../secret", "/etc", "segment-0001/checkpoints/../../..", "", "\x01"])
def test_a_path_that_leads_out_is_never_followed(operator: TestClient, saved: SavedRun, path: str) -> None:
    """P33, T42: the path in a row is compared with what a checkpoint's looks like, whoever wrote it there."""
    with saved.sessions.begin() as session:
        session.execute(update(Checkpoint).where(Checkpoint.id == f"k-{saved.run_id}-1-20").values(path=path))
    refused = operator.get(address(saved, 20, "/download"))
    assert (refused.status_code, refused.json()["code"]) == (409, "checkpoint_damaged")
    assert "no checkpoint's path" in refused.json()["detail"]
    assert not operator.post(address(saved, 20, "/verify")).json()["ok"]


def test_a_folder_that_is_a_link_is_never_followed(operator: TestClient, saved: SavedRun, tmp_path: Path) -> None:
    saved.folder(20).rename(tmp_path / "elsewhere")
    saved.folder(20).symlink_to(tmp_path / "elsewhere")
    assert operator.get(address(saved, 20, "/download")).status_code == 409
    found = operator.post(address(saved, 20, "/verify")).json()
    assert "is a link" in found["detail"]


def test_unknown_names_are_404(operator: TestClient, saved: SavedRun, make_run: Callable[..., str]) -> None:
    """P33: nothing is looked up but ids, and one run's checkpoint is not another's."""
    other = make_run()
    for name in ("k-none", "..%2f..%2fetc", "%252e%252e", f"k-{saved.run_id}-1-10%00", "x" * 5000):
        assert operator.get(f"/v1/runs/{saved.run_id}/checkpoints/{name}/download").status_code in (404, 422)
    assert operator.get(f"/v1/runs/{other}/checkpoints/k-{saved.run_id}-1-10").status_code == 404
    headers = {"If-Match": "*"}
    assert operator.delete(f"/v1/runs/r-none/checkpoints/k-{saved.run_id}-1-10", headers=headers).status_code == 404
    with saved.sessions() as session:
        assert session.get_one(Run, other).state == "queued"
