"""Ranks as processes: one group, told apart when it ends, none left where one cannot start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ppo_core.rundir import RankExit, RankGroup

SLEEP = "import time; print(flush=True); time.sleep(60)"
LEAVE = "print(flush=True)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"


def wait_until(check: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def group_of(*programs: str) -> RankGroup:
    """A rank for each program, once all have printed their line."""
    pipes = []

    def start(rank: int, group: int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", programs[rank]], stdout=subprocess.PIPE, process_group=group)
        pipes.append(process.stdout)
        return process

    ranks = RankGroup(len(programs), start)
    for pipe in pipes:
        assert pipe is not None
        assert pipe.readline() == b"\n"
        pipe.close()
    return ranks


def test_the_group_lives_on_when_its_first_rank_has_left_and_a_stopped_one_is_told_apart() -> None:
    ranks = group_of(LEAVE, SLEEP, SLEEP)
    wait_until(lambda: ranks.exits() == [RankExit(0, 0), RankExit(1, None), RankExit(2, None)])
    assert {os.getpgid(pid) for pid in ranks.pids[1:]} == {ranks.pids[0]}
    os.kill(ranks.pids[1], signal.SIGSTOP)
    wait_until(lambda: " T " in Path(f"/proc/{ranks.pids[1]}/stat").read_text())
    assert not ranks.is_ending
    assert not ranks.end(0.5)
    assert ranks.is_ending
    time.sleep(0.5)
    assert not ranks.all_left()
    assert ranks.end(0.5)
    wait_until(ranks.all_left)
    assert ranks.exits() == [
        RankExit(0, 0),
        RankExit(1, -9, ended=True, stopped=True),
        RankExit(2, -15, ended=True),
    ]
    assert not ranks.kill()


def test_a_second_rank_finds_the_group_of_a_first_one_that_died_at_once() -> None:
    pids: list[int] = []

    def start(rank: int, group: int) -> subprocess.Popen[bytes]:
        if rank:
            wait_until(lambda: " Z " in Path(f"/proc/{pids[0]}/stat").read_text())
        process = subprocess.Popen([sys.executable, "-c", SLEEP if rank else LEAVE], process_group=group)
        pids.append(process.pid)
        return process

    ranks = RankGroup(2, start)
    assert os.getpgid(pids[1]) == pids[0]
    assert ranks.kill()
    ranks.wait()
    assert ranks.exits() == [RankExit(0, 0), RankExit(1, -9)]


def test_deaf_ranks_are_killed_when_the_grace_is_over_and_not_before() -> None:
    ranks = group_of(DEAF, DEAF)
    began = time.monotonic()
    while not ranks.end(0.3):
        assert not ranks.all_left()
        time.sleep(0.02)
    assert 0.3 <= time.monotonic() - began < 5
    ranks.wait()
    assert ranks.exits() == [RankExit(0, -9, ended=True), RankExit(1, -9, ended=True)]


def test_where_one_cannot_start_the_others_are_ended() -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(rank: int, group: int) -> subprocess.Popen[bytes]:
        program = [sys.executable, "-c", SLEEP] if rank < 2 else ["/nowhere/trainer"]
        started.append(subprocess.Popen(program, process_group=group))
        return started[-1]

    with pytest.raises(FileNotFoundError):
        RankGroup(3, start)
    assert [process.returncode for process in started] == [-9, -9]
