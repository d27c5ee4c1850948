"""Marked processes are found wherever they went, and end."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppo_core.rundir import JournalWriter, RankExit, SegmentDir, SegmentStart, create_segment
from tests.worker.platform import alive, wait_until
from worker.attempt_view import AttemptView, last_word
from worker.processes import carries, kill_marked, marked_processes, marks
from worker.trainer_process import RankStart, TrainerProcesses

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """In a session of its own."""
    process = subprocess.Popen(SLEEP, env={**os.environ, **marks("r-test-mark", 3)}, start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_marked_process_is_found_by_run_and_token(sleeper: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: carries(sleeper.pid, "r-test-mark", 3))
    assert [process.pid for process in marked_processes("r-test-mark", 3)] == [sleeper.pid]
    assert marked_processes("r-test-mark", 2) == []
    assert marked_processes("r-test", 9) == []
    assert not carries(sleeper.pid, "r-test-mark", 4)


def test_killing_proves_that_nothing_is_left(sleeper: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: carries(sleeper.pid, "r-test-mark", 3))
    assert kill_marked("r-test-mark", 3) == []
    assert not alive(sleeper.pid)


def test_a_process_that_names_itself_keeps_its_mark() -> None:
    """As vLLM's do; the name goes where arguments and environment lie."""
    pytest.importorskip("setproctitle")
    program = (
        "import setproctitle, time; setproctitle.setproctitle('an engine' * 200); print(flush=True); time.sleep(60)"
    )
    environment = {**os.environ, **marks("r-test-title", 1)}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert carries(process.pid, "r-test-title", 1)
        process.kill()


def test_what_was_started_with_another_environment_is_found_by_its_log(tmp_path: Path) -> None:
    log = SegmentDir(tmp_path / "r-test-log" / "segment-0002").log(3, 0)
    log.parent.mkdir(parents=True)
    with log.open("ab") as output:
        process = subprocess.Popen(SLEEP, env={}, stdout=output, start_new_session=True)
    with log.open("rb") as reading:  # who reads it is none of the run's
        reader = subprocess.Popen(SLEEP, env={}, stdin=reading)
    try:
        assert [(each.pid, each.token) for each in marked_processes("r-test-log", 3)] == [(process.pid, 3)]
        assert marked_processes("r-test-log", 2) == marked_processes("r-test", 9) == []
        assert kill_marked("r-test-log", 3) == []
        assert (process.wait(5), reader.poll()) == (-9, None)
    finally:
        for each in (process, reader):
            each.kill()
            each.wait()


def test_every_rank_dies_with_its_supervisor(tmp_path: Path) -> None:
    program = (
        "import time; from pathlib import Path; from worker.trainer_process import RankStart, TrainerProcesses\n"
        f"ranks = [RankStart(Path({str(tmp_path)!r}, str(rank)), {{}}) for rank in range(3)]\n"
        f"print(*TrainerProcesses({SLEEP!r}, 'r-test-parent', 1, ranks).pids, flush=True); time.sleep(60)"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    ranks = [int(pid) for pid in supervisor.stdout.readline().split()]
    assert [alive(pid) for pid in ranks] == [True] * 3
    supervisor.kill()
    supervisor.communicate()
    wait_until(lambda: not any(alive(pid) for pid in ranks), 2)


def starts(folder: Path, size: int) -> list[RankStart]:
    return [RankStart(folder / f"log-{rank}", {"RANK": str(rank)}) for rank in range(size)]


def test_deaf_ranks_are_killed_after_the_grace(tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    trainer = TrainerProcesses([sys.executable, "-c", deaf], "r-test-deaf", 1, starts(tmp_path, 2))
    wait_until(lambda: all((tmp_path / f"log-{rank}").stat().st_size > 0 for rank in range(2)))
    began = time.monotonic()
    assert not trainer.end(0.3)
    wait_until(lambda: trainer.end(0.3))
    assert 0.3 <= time.monotonic() - began < 5
    assert trainer.exits() == [RankExit(0, -9, ended=True), RankExit(1, -9, ended=True)]


@pytest.fixture
def segment(tmp_path: Path) -> SegmentDir:
    return create_segment(tmp_path / "r", SegmentStart("r", 1, {}))


def test_view_sees_only_what_its_own_attempt_said(segment: SegmentDir) -> None:
    journal = JournalWriter(segment.journal)
    journal.append("started", 0, {"token": 1})
    journal.append("end", 4, {"code": 11, "reason": "stopped", "error": None})
    view = AttemptView(segment)
    view.read()
    assert (view.started, view.end) == (False, None)
    journal.append("started", 4, {"token": 2})
    journal.append("metrics", 5, {"a": 1.0})
    view.read()
    assert (view.started, view.iteration, view.end) == (True, 5, None)
    assert last_word(segment, 1) is None
    journal.append("end", 5, {"code": 70, "reason": "error", "error": None})
    view.read()
    assert view.end is not None
    assert last_word(segment, 2) == view.end


def test_silence_beyond_twice_the_announced_time_is_a_stall(segment: SegmentDir) -> None:
    view = AttemptView(segment)
    JournalWriter(segment.journal).append("phase", 1, {"phase": "update", "deadline_s": 0.05})
    view.read()
    assert view.stalled() is None
    time.sleep(0.15)
    assert "in phase update" in str(view.stalled())
