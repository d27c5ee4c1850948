"""Roll back, fork, resume, retry, pause and checkpoint as requests: what is accepted, refused, previewed and stored."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import select, update
from starlette.testclient import TestClient

from api.going_back import Plan
from api.routes import going_back
from store.checkpoints import starting_points
from store.models import AuditEntry, Checkpoint, Command, Run, Segment
from store.runs import transition
from tests.api.trained_run import Trained

# Roll back


def test_a_roll_back_is_a_command_with_all_that_was_asked(trained: Trained) -> None:
    target = trained.save(20)
    answer = trained.rollback(target, set={"kl.coef": 0.2}, reason="KL ran away")
    assert answer.status_code == 202, answer.text
    command = answer.json()
    assert (command["kind"], command["status"], command["outcome"]) == ("rollback", "pending", None)
    with trained.sessions() as session:
        payload = session.get_one(Command, command["id"]).payload
        assert (payload["checkpoint"], payload["set"], payload["reason"]) == (target, {"kl.coef": 0.2}, "KL ran away")
        assert payload["spec"]["kl"]["coef"] == 0.2
        entry = session.scalars(select(AuditEntry).where(AuditEntry.action == "run.rollback")).all()[-1]
        assert (entry.actor, entry.target, entry.detail["checkpoint"]) == ("the operator", trained.id, target)
        assert starting_points(session, trained.id)[target] == f"roll back {command['id']} starts from it"
        assert session.get_one(Run, trained.id).state == "running", "only a whole checkpoint stops it"


def test_a_repeated_key_is_one_roll_back_even_with_an_old_etag(trained: Trained) -> None:
    target, etag = trained.save(20), trained.etag()
    first = trained.rollback(target, key="once", etag=etag)
    again = trained.rollback(target, key="once", etag=etag)
    assert (again.status_code, again.json()["id"]) == (202, first.json()["id"])
    assert trained.num_commands() == 1
    other = trained.rollback(target, key="once", reason="another body")
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")


def test_twenty_simultaneous_repeats_are_one_roll_back(trained: Trained) -> None:
    """P12, with the ETag that was right when the first of them was sent."""
    target, etag = trained.save(20), trained.etag()
    with ThreadPoolExecutor(20) as threads:
        answers = list(threads.map(lambda _: trained.rollback(target, key="many", etag=etag), range(20)))
    assert {answer.status_code for answer in answers} == {202}, [answer.text for answer in answers]
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert trained.num_commands() == 1


def test_of_ten_different_roll_backs_at_once_one_is_taken(trained: Trained) -> None:
    target, etag = trained.save(20), trained.etag()
    with ThreadPoolExecutor(10) as threads:
        answers = list(threads.map(lambda n: trained.rollback(target, etag=etag, reason=str(n)), range(10)))
    assert sorted(answer.status_code for answer in answers) == [202] + 9 * [412]
    assert trained.num_commands() == 1


def test_key_and_etag_are_required(trained: Trained) -> None:
    target, url = trained.save(20), f"/v1/runs/{trained.id}/rollback"
    no_key = trained.operator.post(url, json={"checkpoint": target}, headers={"If-Match": trained.etag()})
    assert (no_key.status_code, no_key.json()["code"]) == (400, "idempotency_key_missing")
    no_etag = trained.operator.post(url, json={"checkpoint": target}, headers={"Idempotency-Key": uuid4().hex})
    assert (no_etag.status_code, no_etag.json()["code"]) == (428, "if_match_missing")
    assert trained.num_commands() == 0


@pytest.mark.parametrize("etag", ['"1"', "rubbish", '"99999999999999999999"'])
def test_a_stale_etag_is_refused_and_nothing_is_stored(trained: Trained, etag: str) -> None:
    answer = trained.rollback(trained.save(20), etag=etag)
    assert (answer.status_code, answer.json()["code"]) == (412, "if_match_stale")
    assert trained.num_commands() == 0


def test_iterations_leave_the_etag_alone(trained: Trained) -> None:
    before = trained.etag()
    trained.reach(31)
    assert trained.etag() == before


def test_of_two_roll_backs_the_second_is_refused(trained: Trained) -> None:
    target, etag = trained.save(20), trained.etag()
    first = trained.rollback(target, etag=etag).json()
    assert trained.rollback(target, etag=etag).status_code == 412
    fresh = trained.rollback(target)
    assert (fresh.status_code, fresh.json()["code"]) == (409, "illegal_move")
    assert first["id"] in fresh.json()["detail"]


def test_a_stop_supersedes_a_roll_back_and_is_never_superseded_by_one(trained: Trained) -> None:
    target = trained.save(20)
    command = trained.rollback(target).json()["id"]
    assert trained.ask("stop").json()["status"] == "pending"
    found = trained.operator.get(f"/v1/runs/{trained.id}/commands/{command}").json()
    assert (found["status"], found["detail"]) == ("superseded", "stop was asked")
    assert trained.rollback(target).status_code == 409


def test_a_roll_back_supersedes_a_pause(trained: Trained) -> None:
    pause = trained.ask("pause").json()["id"]
    assert trained.rollback(trained.save(20)).status_code == 202
    assert trained.operator.get(f"/v1/runs/{trained.id}/commands/{pause}").json()["status"] == "superseded"
    assert trained.ask("pause").status_code == 409


def test_a_stop_withdraws_the_roll_back_of_a_run_at_rest(trained: Trained) -> None:
    trained.reach(30, "failed")
    command = trained.rollback(trained.save(20)).json()["id"]
    stop = trained.ask("stop").json()
    assert (stop["status"], "withdrawn" in stop["detail"]) == ("done", True)
    assert trained.operator.get(f"/v1/runs/{trained.id}/commands/{command}").json()["status"] == "superseded"


def test_every_fault_of_the_settings_comes_at_once_with_its_remedy(trained: Trained) -> None:
    target = trained.save(20)
    settings = {"rollout.batch_size": 32, "name": "other", "seed": 7, "kl.coef": -1, "kl.cof": 1, "iterations": 10}
    answer = trained.rollback(target, set=settings)
    assert (answer.status_code, answer.json()["code"]) == (422, "bad_spec")
    faults = {fault["pointer"]: fault["message"] for fault in answer.json()["errors"]}
    assert faults.keys() >= {"/set/rollout.batch_size", "/set/name", "/set/seed", "/set/kl.coef", "/set/kl.cof"}
    assert "fork instead" in faults["/set/rollout.batch_size"]
    assert "unknown field" in faults["/set/kl.cof"]
    assert trained.num_commands() == 0


def test_a_name_that_no_answer_can_carry_is_refused_all_the_same(trained: Trained) -> None:
    body = '{"checkpoint": "%s", "set": {"\\ud800": 1, "a\\u0000": 2}}' % trained.save(20)  # noqa: UP031
    headers = {"Content-Type": "application/json"}
    answer = trained.operator.post(f"/v1/runs/{trained.id}/rollback?dry_run=true", content=body, headers=headers)
    assert answer.status_code == 422
    assert "/set/a\u2400" in {fault["pointer"] for fault in answer.json()["errors"]}


def test_fewer_iterations_than_the_checkpoint_has_are_refused(trained: Trained) -> None:
    answer = trained.rollback(trained.save(20), set={"iterations": 19})
    assert [fault["pointer"] for fault in answer.json()["errors"]] == ["/set/iterations"]
    assert "20 or more" in answer.json()["errors"][0]["message"]


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"reward.sources.0.model": "/etc"}, "/set/reward.sources.0.model"),
        ({"reward.sources": [{"kind": "http", "url": "http://10.0.0.1/score"}]}, "/set/reward.sources"),
        ({"nowhere.at.all": 1}, "/set/nowhere.at.all"),
        ({"kl.coef.deeper": 1}, "/set/kl.coef.deeper"),
        ({"reward.sources.7.weight": 1.0}, "/set/reward.sources.7.weight"),
    ],
)
def test_settings_pass_the_checks_of_a_submit(trained: Trained, changes: dict[str, Any], pointer: str) -> None:
    answer = trained.rollback(trained.save(20), set=changes)
    assert answer.status_code == 422
    assert pointer in [fault["pointer"] for fault in answer.json()["errors"]], answer.text


def test_a_checkpoint_of_another_run_is_refused(trained: Trained, submit: Callable[..., dict[str, Any]]) -> None:
    other = Trained(trained.operator, trained.sessions, trained.run_dir.parent / "other", submit()["id"])
    theirs = other.save(20)
    answer = trained.rollback(theirs)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"] == "/checkpoint"
    assert "fork it there" in answer.json()["errors"][0]["message"]
    unknown = trained.rollback("1:20")
    assert (unknown.status_code, "REST takes ids, k-..., which GET" in unknown.json()["detail"]) == (404, True)
    assert trained.operator.post("/v1/runs/r-no/rollback?dry_run=true", json={"checkpoint": theirs}).status_code == 404


def test_a_checkpoint_cut_short_is_refused_before_anything_stops(trained: Trained) -> None:
    """P16: a roll back to a damaged checkpoint is refused with 409."""
    target = trained.save(20)
    file = trained.run_dir / "segment-0001/checkpoints/iter-000020/weights"
    file.write_bytes(file.read_bytes()[:-1])
    answer = trained.rollback(target)
    assert (answer.status_code, answer.json()["code"]) == (409, "checkpoint_damaged")
    assert str(file) in answer.json()["detail"]
    with trained.sessions() as session:
        row = session.get_one(Checkpoint, target)
        assert (row.status, str(file) in (row.status_detail or "")) == ("damaged", True)
        assert session.get_one(Run, trained.id).state == "running"
    assert trained.num_commands() == 0


def test_a_disk_that_is_away_damages_no_checkpoint(trained: Trained) -> None:
    target = trained.save(20)
    aside = trained.run_dir.rename(trained.run_dir.with_name("aside"))
    fork = f"/v1/runs/{trained.id}/forks?dry_run=true"
    for answer in (trained.rollback(target), trained.operator.post(fork, json={"checkpoint": target})):
        assert (answer.status_code, answer.json()["code"]) == (503, "storage_unreadable")
        assert "is the right disk mounted?" in answer.json()["detail"]
    with trained.sessions() as session:
        assert session.get_one(Checkpoint, target).status == "good"
    aside.rename(trained.run_dir)
    assert trained.rollback(target).status_code == 202


def test_a_removed_checkpoint_is_refused(trained: Trained) -> None:
    target = trained.save(20)
    with trained.sessions.begin() as session:
        session.get_one(Checkpoint, target).status = "removed"
    answer = trained.rollback(target)
    assert (answer.status_code, answer.json()["code"]) == (409, "checkpoint_removed")


# Preview


def test_a_preview_stores_nothing_and_says_what_would_be_left_behind(trained: Trained) -> None:
    target = trained.save(20)
    trained.save(25)
    trained.save(30)
    found = trained.preview(target)
    assert found["left_behind"] == {"segment": 1, "from_iteration": 21, "to_iteration": 30, "checkpoints": 2}
    assert found["checkpoint"]["id"] == target
    assert found["changes"] == []
    assert found["repeats_exactly"] is True
    assert found["meaning"]
    assert trained.num_commands() == 0


def test_nothing_is_left_behind_by_the_newest_checkpoint(trained: Trained) -> None:
    assert trained.preview(trained.save(30))["left_behind"] is None


@pytest.mark.parametrize(
    ("changes", "repeats"),
    [
        ({"kl.coef": 0.2}, False),
        ({"data.seed": 5}, False),
        ({"iterations": 200, "checkpoints.every": 5, "samples.every": 2}, True),
        ({"iterations": 200, "update.lr_schedule": "linear"}, False),
        ({"kl.coef": 0.05}, True),
    ],
)
def test_a_preview_says_whether_it_would_repeat(trained: Trained, changes: dict[str, Any], repeats: bool) -> None:
    assert trained.preview(trained.save(20), set=changes)["repeats_exactly"] is repeats


def test_a_change_has_three_values(trained: Trained) -> None:
    """At the checkpoint 0.05, now 0.1 (an earlier roll back's), then 0.3."""
    target = trained.save(20)
    with trained.sessions.begin() as session:
        first = session.get_one(Segment, (trained.id, 1))
        spec = {**first.spec, "kl": {**first.spec["kl"], "coef": 0.1}}
        session.add(
            Segment(
                run_id=trained.id, number=2, kind="rollback", spec=spec, start_iteration=20, start_checkpoint=target
            )
        )
        session.execute(update(Run).where(Run.id == trained.id).values(active_segment=2))
    found = trained.preview(target, set={"kl.coef": 0.3})
    assert found["changes"] == [
        {"path": "kl.coef", "at_checkpoint": 0.05, "now": 0.1, "then": 0.3, "changeable": "rollback"}
    ]
    (undone,) = trained.preview(target)["changes"]
    assert (undone["at_checkpoint"], undone["now"], undone["then"]) == (0.05, 0.1, 0.05)


def test_the_end_of_a_finished_run_can_be_gone_back_to_with_a_warning(trained: Trained) -> None:
    found = trained.preview(trained.save(100))
    assert any("Nothing is left to train" in warning for warning in found["warnings"])


# Fork


def test_a_fork_is_a_new_run_that_goes_on_from_the_checkpoint(trained: Trained) -> None:
    target = trained.save(20)
    answer = trained.fork(target, name="bolder", set={"rollout.batch_size": 32, "kl.coef": 0.2}, reason="try it")
    assert answer.status_code == 201, answer.text
    run = answer.json()
    assert answer.headers["Location"] == f"/v1/runs/{run['id']}"
    assert (run["name"], run["state"], run["iteration"], run["num_iterations"]) == ("bolder", "queued", 20, 100)
    (segment,) = trained.operator.get(f"/v1/runs/{run['id']}/segments").json()["items"]
    assert (segment["kind"], segment["start_checkpoint"], segment["start_iteration"]) == ("fork", target, 20)
    assert segment["started_from"] == {"run_id": trained.id, "segment": 1, "iteration": 20}
    assert (segment["reason"], segment["created_by"]) == ("try it", "the operator")
    changes = {change["path"]: (change["before"], change["after"]) for change in segment["changes"]}
    assert changes == {"name": ("reviews", "bolder"), "rollout.batch_size": (64, 32), "kl.coef": (0.05, 0.2)}
    with trained.sessions() as session:
        assert starting_points(session, trained.id)[target] == f"run {run['id']} starts from it"


def test_a_fork_needs_no_name_and_is_made_once(trained: Trained) -> None:
    target = trained.save(20)
    first, again = trained.fork(target, key="fork"), trained.fork(target, key="fork")
    assert first.json()["name"] == "reviews (fork)"
    assert (again.status_code, again.json()["id"]) == (201, first.json()["id"])


def test_rules_that_came_later_are_in_no_fork_and_no_segment(trained: Trained, admin: TestClient) -> None:
    """Both go on with the settings of their checkpoint."""
    target = trained.save(20)

    def put(alerts: dict[str, Any]) -> None:
        answer = admin.put("/v1/alert-rules", json={"alerts": alerts}, headers={"If-Match": "*"})
        assert answer.status_code == 200, answer.text

    put({"on_story": "stop", "bands": {"response/length_mean": None}})
    try:
        forked = trained.fork(target)
        assert forked.status_code == 201, forked.text
        alerts = trained.operator.get(f"/v1/runs/{forked.json()['id']}").json()["spec"]["alerts"]
        assert (alerts["on_story"], alerts["bands"]) == ("note", {})
        assert trained.preview(target)["changes"] == []
    finally:
        put({})


def test_a_checkpoint_that_goes_while_a_fork_is_made_refuses_it(
    trained: Trained, num_runs: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P17: the pruner came between looking at the checkpoint and storing the run that starts from it."""
    checkpoint, before = trained.save(10), num_runs()
    made = going_back.plan

    def then_it_goes(*arguments: Any, **named: Any) -> Plan:
        found = made(*arguments, **named)
        with trained.sessions.begin() as session:
            session.get_one(Checkpoint, checkpoint).status = "removed"
        return found

    monkeypatch.setattr(going_back, "plan", then_it_goes)
    refused = trained.fork(checkpoint)
    assert (refused.status_code, refused.json()["code"]) == (409, "checkpoint_removed")
    assert num_runs() == before


def test_a_forks_preview_stores_nothing(trained: Trained, num_runs: Callable[[], int]) -> None:
    target, before = trained.save(20), num_runs()
    url = f"/v1/runs/{trained.id}/forks?dry_run=true"
    found = trained.operator.post(url, json={"checkpoint": target, "set": {"seed": 9}}).json()
    assert [(change["path"], change["then"], change["changeable"]) for change in found["changes"]] == [
        ("seed", 9, "fork")
    ]
    assert num_runs() == before


def test_a_name_in_the_settings_of_a_fork_is_told_where_it_belongs(trained: Trained) -> None:
    answer = trained.fork(trained.save(20), set={"name": "x"})
    assert answer.status_code == 422
    assert "as `name`" in answer.json()["errors"][0]["message"]


# Resume, retry, pause, checkpoint


@pytest.mark.parametrize(("way", "word"), [("pausing paused", "resume"), ("stopped", "resume"), ("failed", "retry")])
def test_a_run_at_rest_is_queued_again(trained: Trained, way: str, word: str) -> None:
    trained.reach(30, *way.split())
    answer = trained.ask(word)
    assert (answer.status_code, answer.json()["status"], answer.json()["kind"]) == (202, "done", word)
    run = trained.operator.get(f"/v1/runs/{trained.id}").json()
    assert (run["state"], run["reason_code"], run["ended_at"]) == ("queued", word, None)
    refused = trained.ask(word)
    assert (refused.status_code, refused.json()["code"]) == (409, "illegal_move")


def test_a_cancelled_run_is_retried_with_a_whole_budget(trained: Trained) -> None:
    trained.reach(30, "killing", "cancelled")
    with trained.sessions.begin() as session:
        session.execute(update(Run).where(Run.id == trained.id).values(infrastructure_failures=3))
    assert trained.ask("retry").status_code == 202
    with trained.sessions() as session:
        assert session.get_one(Run, trained.id).infrastructure_failures == 0


@pytest.mark.parametrize(
    ("way", "word", "sentence"),
    [
        ("", "resume", "reviews is running; only a run that is paused or stopped can be resumed."),
        ("failed", "resume", "reviews is failed; only a run that is paused or stopped can be resumed; retry it."),
        ("stopped", "retry", "reviews is stopped; only a run that is failed or cancelled can be retried; resume it."),
        (
            "succeeded",
            "resume",
            "reviews is succeeded; only a run that is paused or stopped can be resumed; roll back with a higher "
            "`iterations`, or fork, to train on.",
        ),
    ],
)
def test_a_refusal_says_what_to_do_instead(trained: Trained, way: str, word: str, sentence: str) -> None:
    trained.reach(30, *way.split())
    answer = trained.ask(word)
    assert (answer.status_code, answer.json()["detail"]) == (409, sentence)
    assert answer.json()["allowed"]


def test_pause_and_checkpoint_are_open_commands_and_asking_twice_is_one(trained: Trained) -> None:
    saved = trained.ask("checkpoint")
    assert (saved.status_code, saved.json()["status"]) == (202, "pending")
    assert trained.ask("checkpoint").json()["id"] == saved.json()["id"]
    paused = trained.ask("pause")
    assert (paused.status_code, paused.json()["kind"]) == (202, "pause")
    assert trained.operator.get(f"/v1/runs/{trained.id}").json()["state"] == "pausing"


def test_a_run_at_rest_neither_pauses_nor_saves(trained: Trained) -> None:
    trained.reach(30, "stopped")
    assert (trained.ask("pause").status_code, trained.ask("checkpoint").status_code) == (409, 409)
    with trained.sessions.begin() as session:
        for state in ("queued", "starting", "running", "pausing", "paused"):
            transition(session, trained.id, state)
    assert trained.ask("pause").json()["detail"] == "reviews is paused already."
