"""`ppo train` with several ranks of the scripted trainer: together from start to end, and a lost one is named.

What takes many seconds is marked `stack`, to keep the plain run short.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ppo.ranks import start_ranks
from ppo_core.rundir import SegmentDir, SegmentStart, all_events, create_segment, segment_dir
from tests.ppo.test_train import is_zombie, wait_for

Script = Callable[..., None]

pytestmark = pytest.mark.usefixtures("scripted")

OUTCOME_S = 30.0
# The number of ranks is set behind the spec's own checks: what is trained is only a script.
PROGRAM = """
import dataclasses, sys
from pathlib import Path
from rich.console import Console
from ppo.train import prepare, train
attempt = prepare(Path(sys.argv[1]), sys.argv[4:], Path(sys.argv[2]), resume=False)
training = attempt.spec.training.model_copy(update={"ranks": int(sys.argv[3])})
spec = attempt.spec.model_copy(update={"training": training})
sys.exit(train(dataclasses.replace(attempt, spec=spec), Console(), as_json=False))
"""


class Terminal:
    """A `ppo train` with several ranks, and the processes that it started."""

    def __init__(self, spec_file: Path, run_dir: Path, ranks: int, *overrides: str) -> None:
        self.segment: SegmentDir = segment_dir(run_dir, 1)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(spec_file), str(run_dir), str(ranks), *overrides],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self._ranks = ranks
        self.started: list[psutil.Process] = []

    def wait_started(self) -> None:
        """Until all ranks have met and made an iteration."""
        wait_for(lambda: any(event.type == "metrics" for event in all_events(self.segment.journal)))
        self.started = psutil.Process(self.process.pid).children()
        assert len(self.started) == self._ranks

    def end(self) -> str:
        """What it printed, once it has ended and left no process behind."""
        output, _ = self.process.communicate(timeout=OUTCOME_S)
        wait_for(lambda: all(is_zombie(process.pid) for process in self.started), 5)
        return output


@pytest.fixture
def terminal(spec_file: Path, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    terminals: list[Terminal] = []

    def start(ranks: int, *overrides: str) -> Terminal:
        terminals.append(Terminal(spec_file, tmp_path / "run", ranks, *overrides))
        return terminals[-1]

    yield start
    for each in terminals:
        each.process.kill()
        each.process.wait()


@pytest.fixture
def running(terminal: Callable[..., Terminal], scripted: Script) -> Callable[..., Terminal]:
    """A run of three ranks that goes on until it is ended."""

    def start(**knobs: object) -> Terminal:
        scripted(**{"iteration_s": 0.05, "checkpoint_every": 100_000, **knobs})
        found = terminal(3, "iterations=100000")
        found.wait_started()
        return found

    return start


def test_all_reach_the_end_in_one_group_each_with_its_own_log(terminal: Callable[..., Terminal]) -> None:
    found = terminal(3, "iterations=60")
    found.wait_started()
    groups = {os.getpgid(process.pid) for process in found.started}
    assert groups == {found.started[0].pid}
    assert groups != {os.getpgid(found.process.pid)}  # a terminal's Ctrl-C goes to another
    output = found.end()
    assert found.process.returncode == 0, output
    assert "succeeded: 60 iterations" in output
    for rank in range(3):
        assert found.segment.log(1, rank).read_text().startswith("scripted attempt 1")


def test_a_killed_rank_is_named_with_its_log_and_the_others_are_ended(running: Callable[..., Terminal]) -> None:
    """They wait for it for ever, deaf to SIGTERM."""
    found = running(stays=True, ignore_stop=True)
    began = time.monotonic()
    found.started[1].kill()
    output = found.end()
    assert time.monotonic() - began < 10
    assert found.process.returncode == 1
    assert "rank 1: signal 9; ranks 0, 2: signal 9, ended with the others" in output
    assert str(found.segment.log(1, 1)) in re.sub(r"\s", "", output)


@pytest.mark.stack
def test_a_rank_0_that_saves_when_it_is_ended_was_not_stopped_by_anybody(running: Callable[..., Terminal]) -> None:
    found = running(iteration_s=3, meeting_s=60)
    found.started[1].kill()
    output = found.end()
    assert found.process.returncode == 1
    assert "the trainer ended without a word (rank 1: signal 9; " in output


def test_each_rank_is_told_its_number_the_place_to_meet_at_and_its_own_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES", "MASTER_PORT"]
    program = f"import os; print(*(os.environ[name] for name in {names}))"
    monkeypatch.setenv("PPO_TRAINER_COMMAND", shlex.join([sys.executable, "-c", program]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setenv("RANK", "7")  # `ppo train` may be somebody's rank itself
    segment = create_segment(tmp_path, SegmentStart("r", 1, {}))
    ports = set()
    for attempt in (1, 2):
        start_ranks(segment, attempt, size=2, num_gpus=2).wait()
        lines = [segment.log(attempt, rank).read_text().split() for rank in range(2)]
        assert [line[:-1] for line in lines] == [["0", "2", "0", "127.0.0.1", "4"], ["1", "2", "0", "127.0.0.1", "5"]]
        ports |= {line[-1] for line in lines}
    assert len(ports) == 2


@pytest.mark.stack
def test_a_stopped_rank_is_found_by_the_others_and_killed(running: Callable[..., Terminal]) -> None:
    found = running(meeting_s=1)
    found.started[2].send_signal(signal.SIGSTOP)
    output = found.end()
    assert found.process.returncode == 1
    assert "exit code 1; rank 2: signal 9, ended while it stood stopped" in output


def test_a_rank_that_fails_alone_tells_its_fault_and_its_log(
    terminal: Callable[..., Terminal], scripted: Script
) -> None:
    scripted(rank=2, fault_at=3)
    found = terminal(3)
    output = found.end()
    assert found.process.returncode == 1
    assert "failed: data: rank 2: row 7 is empty\n  fill it\n" in output
    assert f"  log: {found.segment.log(1, 2)}\n" in output


def test_a_rank_that_leaves_with_a_faults_code_shows_the_end_of_its_log(
    terminal: Callable[..., Terminal], scripted: Script
) -> None:
    scripted(rank=1, leave_at=[2, 70])
    output = terminal(2).end()
    assert "failed: trainer_fault: rank 1: exit code 70; the end of its log:\n" in output
    assert "rank 1 cannot go on" in output


@pytest.mark.stack
def test_a_rank_that_stays_after_the_last_word_is_killed_and_changes_nothing(
    terminal: Callable[..., Terminal], scripted: Script
) -> None:
    scripted(linger_s=600)
    found = terminal(2)
    found.wait_started()
    assert "succeeded: 6 iterations" in found.end()
    assert found.process.returncode == 0


def test_ctrl_c_once_stops_all_with_a_checkpoint(running: Callable[..., Terminal]) -> None:
    found = running()
    found.process.send_signal(signal.SIGINT)
    output = found.end()
    assert found.process.returncode == 3
    assert "stopped after iteration" in output
    assert [event.type for event in all_events(found.segment.journal)][-3:] == ["checkpoint", "ack", "end"]


def test_ctrl_c_twice_kills_all(running: Callable[..., Terminal]) -> None:
    found = running(ignore_stop=True)
    found.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    found.process.send_signal(signal.SIGINT)
    assert "killed; what was not saved is lost" in found.end()
    assert found.process.returncode == 3


def test_all_stop_with_a_checkpoint_when_their_terminal_is_killed(running: Callable[..., Terminal]) -> None:
    found = running()
    found.process.kill()
    found.end()
    assert list(all_events(found.segment.journal))[-1].payload["code"] == 11
