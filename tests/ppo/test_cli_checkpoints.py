"""`ppo checkpoints` and the client behind it, against the real service and checkpoints on disk."""

from __future__ import annotations

import json
import tarfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from sqlalchemy.orm import Session, sessionmaker
from typer.testing import CliRunner

from ppo.checkpoint_finding import NoSuchCheckpointError, find_checkpoint, place
from ppo.cli import app
from ppo.client import Client, RequestError, UnreachableError
from ppo.exits import Exit
from store.ids import new_id
from store.metrics_write import IterationMetrics, write_metrics
from store.models import Run, Segment
from store.runs import create_run
from tests.api.checkpoint_files import SavedRun

NOW = datetime(2026, 11, 1, tzinfo=UTC)


@pytest.fixture
def run(client: Client, folder: Path, sessions: sessionmaker[Session]) -> SavedRun:
    """Segment 1 reached 40 and was left at 20; segment 2 goes on from there and reached 40. Two stay."""
    run_id = new_id("r")
    spec = {"checkpoints": {"every": 10, "keep_last": 2, "keep_best": 0}}
    with sessions.begin() as session:
        create_run(
            session, run_id=run_id, name="toy", spec=spec, num_iterations=50, priority=0, gpus=0, created_by="ada"
        )
    run = SavedRun(sessions, folder / "data" / "runs" / run_id, run_id)
    for iteration in (10, 20, 30, 40):
        run.save(iteration, verified_at=NOW)
    with sessions.begin() as session:
        start = f"k-{run_id}-1-20"
        session.add(Segment(run_id=run_id, number=2, kind="rollback", spec=spec, start_iteration=20,
                            start_checkpoint=start))  # fmt: skip
        session.get_one(Run, run_id).active_segment = 2
        session.flush()
        for segment, first in ((1, 1), (2, 21)):
            rows = [IterationMetrics(iteration, NOW, {"kl/coef": 0.1}) for iteration in range(first, 41)]
            write_metrics(session, run_id, segment, rows, active=segment == 2)
    for iteration in (30, 40):
        run.save(iteration, segment=2, verified_at=NOW)
    return run


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["checkpoints", *arguments])


def answer(*arguments: str) -> Any:
    done = invoke(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


# Which one is meant


@pytest.mark.parametrize(
    ("text", "meant"),
    [("20", "1:20"), ("30", "2:30"), ("1:30", "1:30"), ("last-good", "2:40"), ("10", "1:10"), ("2:40", "2:40")],
)
def test_a_checkpoint_is_named_by_iteration_segment_or_as_the_last_good(
    client: Client, run: SavedRun, text: str, meant: str
) -> None:
    found = find_checkpoint(client, run.run_id, text)
    assert place(found) == meant
    assert find_checkpoint(client, run.run_id, found["id"]) == found


@pytest.mark.parametrize("text", ["25", "2:20", "", "k-", "1:", "²"])
def test_what_names_none_or_several_is_refused_with_what_there_is(client: Client, run: SavedRun, text: str) -> None:
    with pytest.raises(NoSuchCheckpointError, match=r"2:40|fits several"):
        find_checkpoint(client, run.run_id, text)


def test_one_beside_the_present_line_is_pointed_to(client: Client, run: SavedRun) -> None:
    run.save(35, verified_at=NOW)
    with pytest.raises(NoSuchCheckpointError, match="beside it there is 1:35"):
        find_checkpoint(client, run.run_id, "35")


def test_the_last_good_one_is_not_a_damaged_one(client: Client, run: SavedRun) -> None:
    (run.folder(40, 2) / "state.json").unlink()
    assert invoke("verify", run.run_id, "last-good").exit_code == Exit.FAILED
    assert place(find_checkpoint(client, run.run_id, "last-good")) == "2:30"


# The commands


def test_they_are_listed_for_programs_and_for_people(run: SavedRun) -> None:
    for arguments in ((run.run_id,), ("ls", run.run_id)):
        lines = invoke(*arguments).stdout.splitlines()
        assert [line.split("\t")[1] for line in lines] == ["1:10", "1:20", "1:30", "1:40", "2:30", "2:40"]
        assert lines[1].endswith("segment 2 starts from it")
    assert [item["iteration"] for item in answer(run.run_id)] == [10, 20, 30, 40, 30, 40]
    assert invoke("r-nobody").exit_code == Exit.USAGE
    assert invoke("verify", run.run_id, "25").exit_code == Exit.USAGE


def test_pins_and_names_come_and_go(run: SavedRun) -> None:
    assert answer("pin", run.run_id, "1:10")["pinned"] is True
    assert answer("label", run.run_id, "1:10", "before [bold]the slump")["label"] == "before [bold]the slump"
    assert "pinned, named 'before [bold]the slump'" in invoke("pin", run.run_id, "1:10").stdout
    refused = invoke("rm", run.run_id, "1:10")
    assert refused.exit_code == Exit.USAGE
    assert "take the pin away first" in refused.stderr
    assert answer("unpin", run.run_id, "1:10")["pinned"] is False
    assert answer("label", run.run_id, "1:10", "")["label"] is None


def test_one_is_removed_by_hand_and_what_is_needed_is_not(client: Client, run: SavedRun) -> None:
    assert answer("rm", run.run_id, "2:30")["removed"] == f"k-{run.run_id}-2-30"
    assert invoke("rm", run.run_id, "2:30").exit_code == Exit.USAGE, "it is found no longer"
    with pytest.raises(RequestError, match="segment 2 starts from it"):
        client.delete(run.run_id, f"k-{run.run_id}-1-20")
    assert "newest verified" in invoke("rm", run.run_id, "last-good").stderr


def test_a_preview_says_what_goes_and_removes_nothing(run: SavedRun) -> None:
    preview = answer("gc-preview", run.run_id)
    assert [(i["segment"], i["iteration"]) for i in preview["items"] if not i["stays"]] == [(1, 30), (1, 10)]
    text = invoke("gc-preview", run.run_id, "--keep-last", "1").stdout
    assert "goes   2:30" in text
    assert "nothing was removed" in text
    assert invoke("gc-preview", run.run_id, "--keep-last", "0").exit_code == Exit.USAGE
    assert len(answer(run.run_id)) == 6


def test_damage_is_told_with_the_file_and_exit_code_1(run: SavedRun) -> None:
    assert "is whole: 4 files" in invoke("verify", run.run_id, "30").stdout
    (run.folder(30, 2) / "state.json").write_text("{}")
    done = invoke("verify", run.run_id, "30", "--json")
    assert done.exit_code == Exit.FAILED
    assert "state.json has 2 bytes" in json.loads(done.stdout)["detail"]


def test_a_policy_is_written_to_a_file_that_unpacks_to_its_folder(run: SavedRun, tmp_path: Path) -> None:
    target = tmp_path / "policy.tar"
    said = answer("download", run.run_id, "last-good", "--part", "policy", "--to", str(target))
    assert said == {"checkpoint": f"k-{run.run_id}-2-40", "file": str(target), "bytes": target.stat().st_size}
    with tarfile.open(target) as tar:
        tar.extractall(tmp_path, filter="data")
    (folder,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    config = (run.folder(40, 2) / "policy" / "config.json").read_bytes()
    assert (folder / "config.json").read_bytes() == config
    again = invoke("download", run.run_id, "last-good", "--to", str(target))
    assert again.exit_code == Exit.USAGE
    assert "exists already" in again.stderr
    assert invoke("download", run.run_id, "40", "--to", str(tmp_path / "no" / "x")).exit_code == Exit.FAILED


def test_a_download_that_breaks_off_leaves_no_file(client: Client, run: SavedRun, tmp_path: Path) -> None:
    with (run.folder(40, 2) / "policy" / "model.safetensors").open("r+b") as file:
        file.write(b"\xff")
    with pytest.raises(UnreachableError, match="broke off"):
        client.download(run.run_id, f"k-{run.run_id}-2-40", tmp_path / "x.tar")
    (run.folder(40, 2) / "state.json").unlink()
    with pytest.raises(RequestError, match=r"state\.json"):
        client.download(run.run_id, f"k-{run.run_id}-2-40", tmp_path / "x.tar")
    assert list(tmp_path.iterdir()) == []
