"""`ppo train` as a person runs it: a process of its own, with a scripted trainer in the real one's place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ppo_core.rundir import all_events, checkpoints, segment_dir, segments

Script = Callable[..., None]

pytestmark = pytest.mark.usefixtures("scripted")


def ppo(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ppo.cli", *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False,
        timeout=60,
    )  # fmt: skip


def wait_for(what: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_to_its_end(spec_file: Path, tmp_path: Path) -> None:
    done = ppo("train", spec_file, "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "iteration 6/6: reward/score_mean 6" in done.stdout
    assert "succeeded: 6 iterations" in done.stdout
    segment = segment_dir(tmp_path / "run", 1)
    assert segment.log(1, 0).exists()
    assert segment.read_start().spec["policy"]["model"] == str(spec_file.parent / "model")


def test_the_default_run_directory_is_named_after_the_run(spec_file: Path, tmp_path: Path) -> None:
    assert ppo("train", spec_file, cwd=tmp_path).returncode == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("tiny-run-1-")


def test_set_changes_a_field(spec_file: Path, tmp_path: Path) -> None:
    done = ppo("train", spec_file, "--run-dir", tmp_path / "run", "--set", "iterations=2", "--set", "kl.coef=0.5")
    assert done.returncode == 0
    assert segment_dir(tmp_path / "run", 1).read_start().spec["kl"]["coef"] == 0.5
    assert "iteration 2/2" in done.stdout


def test_json_is_the_journal_and_nothing_else(spec_file: Path, tmp_path: Path) -> None:
    done = ppo("train", spec_file, "--run-dir", tmp_path / "run", "--json")
    assert done.stdout == segment_dir(tmp_path / "run", 1).journal.read_text()
    assert json.loads(done.stdout.splitlines()[-1])["payload"]["code"] == 0


def test_old_checkpoints_go_by_the_retention_rules(spec_file: Path, tmp_path: Path) -> None:
    assert ppo("train", spec_file, "--run-dir", tmp_path / "run").returncode == 0
    left = [path.name for path in checkpoints(segment_dir(tmp_path / "run", 1))]
    assert left == ["iter-000005", "iter-000006"]


@pytest.mark.parametrize(("end", "code"), [(0, 0), (10, 3), (11, 3), (64, 2), (65, 1), (69, 4), (70, 1), (75, 3)])
def test_exit_codes(spec_file: Path, tmp_path: Path, scripted: Script, end: int, code: int) -> None:
    scripted(end_at=[2, end])
    assert ppo("train", spec_file, "--run-dir", tmp_path / "run").returncode == code


def test_a_failure_is_shown_with_its_remedy(spec_file: Path, tmp_path: Path, scripted: Script) -> None:
    scripted(end_at=[2, 70])
    done = ppo("train", spec_file, "--run-dir", tmp_path / "run")
    assert "failed: first_minibatch_ratio: ratio is 1.034" in done.stdout
    assert "  compare\n" in done.stdout


def test_a_trainer_that_cannot_start_shows_the_end_of_its_log(
    spec_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PPO_TRAINER_COMMAND", f"{sys.executable} -c 'print(\"something odd\"); raise SystemExit(3)'")
    done = ppo("train", spec_file, "--run-dir", tmp_path / "run")
    assert done.returncode == 1
    assert "something odd" in done.stdout
    assert "exit code 3" in done.stdout


def test_a_trainer_killed_by_somebody_else_is_a_failure(spec_file: Path, tmp_path: Path, scripted: Script) -> None:
    scripted(die_at=3)
    done = ppo("train", spec_file, "--run-dir", tmp_path / "run")
    assert done.returncode == 1
    assert "signal 9" in done.stdout


class Slow:
    """A `ppo train` that goes on until it is ended."""

    def __init__(self, spec_file: Path, run_dir: Path, *more: str) -> None:
        self.run_dir = run_dir
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "ppo.cli", "train", str(spec_file), "--run-dir", str(run_dir),
                "--set", "iterations=100000", *more,
            ],
            env={**os.environ, "PPO_SCRIPTED": '{"iteration_s": 0.05, "checkpoint_every": 100000}'},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        wait_for(lambda: bool(segments(run_dir)) and any(e.type == "metrics" for e in self.events()))

    def events(self) -> list:
        return list(all_events(segments(self.run_dir)[-1].journal))

    @property
    def trainer(self) -> int:
        return int([event.payload["pid"] for event in self.events() if event.type == "started"][-1])

    def __enter__(self) -> Slow:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=20)
        wait_for(lambda: not psutil.pid_exists(self.trainer) or is_zombie(self.trainer))


def is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_with_a_checkpoint(spec_file: Path, tmp_path: Path, signum: signal.Signals) -> None:
    with Slow(spec_file, tmp_path / "run") as slow:
        slow.process.send_signal(signum)
        output, _ = slow.process.communicate(timeout=20)
        assert slow.process.returncode == 3
        assert "stopping with a checkpoint" in output
        assert "--resume" in output
        *_, checkpoint, done, end = slow.events()
        assert checkpoint.payload["reason"] == "stop"
        assert done.payload["status"] == "done"
        assert end.payload["code"] == 11


def test_a_second_ctrl_c_kills(spec_file: Path, tmp_path: Path) -> None:
    with Slow(spec_file, tmp_path / "run") as slow:
        os.kill(slow.trainer, signal.SIGSTOP)  # it cannot answer the first
        slow.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        slow.process.send_signal(signal.SIGINT)
        output, _ = slow.process.communicate(timeout=20)
        assert slow.process.returncode == 3
        assert "killed" in output


def test_the_trainer_stops_when_its_terminal_is_killed(spec_file: Path, tmp_path: Path) -> None:
    with Slow(spec_file, tmp_path / "run") as slow:
        slow.process.kill()
        wait_for(lambda: slow.events()[-1].type == "end")
        assert slow.events()[-1].payload["code"] == 11


def test_resume_goes_on_and_is_not_stopped_by_the_old_command(spec_file: Path, tmp_path: Path) -> None:
    with Slow(spec_file, tmp_path / "run") as slow:
        slow.process.send_signal(signal.SIGINT)
        slow.process.communicate(timeout=20)
        reached = slow.events()[-1].iteration
    with Slow(spec_file, tmp_path / "run", "--resume") as slow:
        wait_for(lambda: any(e.type == "metrics" and e.iteration > reached for e in slow.events()))
        assert len(segments(tmp_path / "run")) == 1
        assert [e.payload["attempt"] for e in slow.events() if e.type == "started"] == [1, 2]


def test_resume_shows_only_what_is_new(spec_file: Path, tmp_path: Path, scripted: Script) -> None:
    scripted(end_at=[2, 75])
    ppo("train", spec_file, "--run-dir", tmp_path / "run")
    before = len(list(all_events(segment_dir(tmp_path / "run", 1).journal)))
    done = ppo("train", spec_file, "--run-dir", tmp_path / "run", "--resume", "--json")
    assert json.loads(done.stdout.splitlines()[0])["seq"] == before + 1


def test_resume_passes_over_a_damaged_checkpoint_and_says_so(spec_file: Path, tmp_path: Path, scripted: Script) -> None:
    """P16: it goes on from the newest good one, in a segment of its own."""
    scripted(end_at=[4, 75])
    assert ppo("train", spec_file, "--run-dir", tmp_path / "run").returncode == 3
    first = segment_dir(tmp_path / "run", 1)
    (first.checkpoint(4) / "weights").write_bytes(b"v" + b"w" * 99)
    scripted()
    done = ppo("train", spec_file, "--run-dir", tmp_path / "run", "--resume")
    assert done.returncode == 0, done.stdout
    assert f"damaged checkpoint, passed over: {first.checkpoint(4)}/weights has SHA-256" in done.stdout
    second = segment_dir(tmp_path / "run", 2)
    assert second.read_start().checkpoint == str(first.checkpoint(3))
    assert [e.iteration for e in all_events(second.journal) if e.type == "metrics"] == [4, 5, 6]


def test_a_full_disk_pauses_and_resume_goes_on(spec_file: Path, tmp_path: Path, scripted: Script) -> None:
    """P18: told as what it is, with the remedy; no success, and no failure either."""
    scripted(disk_full_at=3)
    done = ppo("train", spec_file, "--run-dir", tmp_path / "run")
    assert done.returncode == 3
    assert "paused: disk_full: no space left to write it" in done.stdout
    assert "free space" in done.stdout
    scripted()
    assert ppo("train", spec_file, "--run-dir", tmp_path / "run", "--resume").returncode == 0
    assert segment_dir(tmp_path / "run", 2).read_start().checkpoint == str(
        segment_dir(tmp_path / "run", 1).checkpoint(2)
    )


def test_a_finished_run_is_not_resumed(spec_file: Path, tmp_path: Path) -> None:
    assert ppo("train", spec_file, "--run-dir", tmp_path / "run").returncode == 0
    done = ppo("train", spec_file, "--run-dir", tmp_path / "run", "--resume")
    assert done.returncode == 0
    assert "reached its end" in done.stderr


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_a_used_run_directory_is_refused(spec_file: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    refused(ppo("train", spec_file, "--run-dir", tmp_path / "run"), "is not empty", "--resume")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_resume_needs_a_run(spec_file: Path, tmp_path: Path) -> None:
    refused(ppo("train", spec_file, "--resume"), "--run-dir")
    refused(ppo("train", spec_file, "--resume", "--run-dir", tmp_path / "none"), "nothing to resume")


def test_resume_refuses_another_spec(spec_file: Path, tmp_path: Path) -> None:
    ppo("train", spec_file, "--run-dir", tmp_path / "run")
    changed = ppo("train", spec_file, "--run-dir", tmp_path / "run", "--resume", "--set", "kl.coef=0.9")
    refused(changed, "/kl/coef", "differs")


def forget_newer_fields(run_dir: Path) -> None:
    """As if the folder had been made before these groups and fields were there."""
    path = segment_dir(run_dir, 1).spec
    document = json.loads(path.read_text())
    for group in ("alerts", "preflight"):
        del document["spec"][group]
    del document["spec"]["checkpoints"]["keep_best"]
    path.write_text(json.dumps(document))


def test_a_folder_older_than_some_groups_resumes_with_their_defaults(
    spec_file: Path, tmp_path: Path, scripted: Script
) -> None:
    run = tmp_path / "run"
    scripted(end_at=[2, 75])
    ppo("train", spec_file, "--run-dir", run)
    forget_newer_fields(run)
    scripted()
    other = ppo("train", spec_file, "--run-dir", run, "--resume", "--set", "alerts.on_critical=stop")
    refused(other, "/alerts/on_critical", "differs")
    done = ppo("train", spec_file, "--run-dir", run, "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    told = [event.iteration for event in all_events(segment_dir(run, 1).journal) if event.type == "metrics"]
    assert told == [1, 2, 3, 4, 5, 6]


def test_a_folder_older_than_some_groups_is_gone_back_in(spec_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    keep = ("--set", "checkpoints.keep_last=-1")
    assert ppo("train", spec_file, "--run-dir", run, *keep).returncode == 0
    forget_newer_fields(run)
    done = ppo("train", spec_file, "--run-dir", run, "--rollback", "4", *keep)
    assert done.returncode == 0, done.stdout + done.stderr
    assert segment_dir(run, 2).read_start().spec["alerts"]["on_critical"] == "note"


def test_every_fault_of_a_spec_is_one_line(spec_file: Path, tmp_path: Path) -> None:
    done = ppo(
        "train", spec_file, "--run-dir", tmp_path / "run", "--set", "kl.coef=-1", "--set", "update.epoch=3",
        "--set", "iterations=many",
    )  # fmt: skip
    refused(done, "/kl/coef: ", "/update/epoch: unknown field; did you mean `epochs`?", "/iterations: ")
    assert not (tmp_path / "run").exists()


def test_faults_as_json(spec_file: Path) -> None:
    done = ppo("train", spec_file, "--json", "--set", "kl.coef=-1")
    assert done.returncode == 2
    (fault,) = json.loads(done.stdout)["error"]["errors"]
    assert fault["pointer"] == "/kl/coef"


def test_missing_files_are_named(spec_file: Path) -> None:
    refused(ppo("train", spec_file, "--set", "policy.model=no/such/model"), "/policy/model: ", "no/such/model")
    refused(ppo("train", "no-such-spec.yaml"), "no-such-spec.yaml cannot be read")


def test_broken_yaml_is_told_with_its_line(spec_file: Path) -> None:
    spec_file.write_text("name: x\npolicy: {model: [")
    refused(ppo("train", spec_file), "not valid YAML: line 2")


def test_a_run_goes_back_to_a_checkpoint_in_a_new_segment(spec_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    keep = ("--set", "checkpoints.keep_last=-1")
    assert ppo("train", spec_file, "--run-dir", run, *keep).returncode == 0
    before = segment_dir(run, 1).journal.read_bytes()
    done = ppo("train", spec_file, "--run-dir", run, "--rollback", "4", "--set", "kl.coef=0.5", *keep)
    assert done.returncode == 0, done.stderr + done.stdout
    start = segment_dir(run, 2).read_start()
    assert (start.checkpoint, start.spec["kl"]["coef"]) == (str(segment_dir(run, 1).checkpoint(4)), 0.5)
    told = [event.iteration for event in all_events(segment_dir(run, 2).journal) if event.type == "metrics"]
    assert told == [5, 6]
    assert ppo("train", spec_file, "--run-dir", run, "--rollback", "1:6", *keep).returncode == 0
    assert segment_dir(run, 3).read_start().checkpoint == str(segment_dir(run, 1).checkpoint(6))
    assert segment_dir(run, 1).journal.read_bytes() == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--rollback", "5"), "there are 1:1, 1:2"),
        (("--rollback", "x"), "write an iteration"),
        (("--rollback", "2", "--set", "seed=9"), "/seed: seed cannot change within a run (it is 1): fork instead"),
        (("--rollback", "2", "--set", "iterations=1"), "after iteration 2"),
    ],
)
def test_a_roll_back_that_cannot_be_is_refused(
    spec_file: Path, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    run = tmp_path / "run"
    short = ("--set", "iterations=2")
    assert ppo("train", spec_file, "--run-dir", run, *short).returncode == 0
    done = ppo("train", spec_file, "--run-dir", run, *short, *options)
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    assert len(segments(run)) == 1


def test_a_roll_back_to_a_checkpoint_with_another_manifest_is_refused(spec_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    short = ("--set", "iterations=2")
    assert ppo("train", spec_file, "--run-dir", run, *short).returncode == 0
    manifest = segment_dir(run, 1).checkpoint(2) / "manifest.json"
    manifest.write_text(manifest.read_text() + "\n")
    done = ppo("train", spec_file, "--run-dir", run, *short, "--rollback", "2")
    assert (done.returncode, "when it was written it was" in done.stderr) == (2, True), done.stderr
    assert len(segments(run)) == 1
