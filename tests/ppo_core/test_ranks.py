"""What ranks tell each other, and whose word counts; alone, nothing is told."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_core.control import Control, Interrupted
from ppo_core.errors import DataError, RewardError
from ppo_core.ranks import ALONE, Ranks, Unpicklable
from ppo_core.rundir import SegmentDir, SilentJournal
from ppo_core.rundir.ranks import free_port, rank_environment
from ppo_core.spec import Fault, SpecFaults


class Odd(Exception):
    """Cannot travel: it takes two arguments and keeps one."""

    def __init__(self, text: str, more: int) -> None:
        super().__init__(text)


def raised(call: Callable[[], object]) -> str:
    try:
        return f"returned {call()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def where(call: Callable[[], object]) -> bool:
    """Whether what is raised says which line failed, wherever that was."""
    try:
        call()
    except Exception as error:
        return "in fail" in "".join(traceback.format_exception(error))
    return False


def fail(error: Exception) -> Any:
    raise error


def listening_addresses() -> set[str]:
    """The addresses, as the kernel writes them, on which this process takes connections."""
    own = {entry.stat().st_ino for entry in Path("/proc/self/fd").iterdir() if entry.is_socket()}
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and int(line[9]) in own}


def member(rank: int, port: int, results: Any) -> None:
    os.environ.update(rank_environment(rank, 2, port, []))
    ranks = Ranks.join(60)
    found = {
        "gather": ranks.gather(f"of {rank}"),
        "first": ranks.first(lambda: f"of {rank}"),
        "add": float(ranks.add(torch.tensor([1.0 + rank]))[0]),
        "mine": ranks.mine(range(5)),
        "together": ranks.together(lambda: rank * 10),
        "fault of one": raised(lambda: ranks.together(lambda: fail(DataError("row 7")) if rank == 1 else 3)),
        "fault before interruption": raised(
            lambda: ranks.together(lambda: fail(Interrupted()) if rank == 0 else fail(RewardError("all are NaN")))
        ),
        "interruption": raised(lambda: ranks.together(lambda: fail(Interrupted()) if rank == 1 else 3)),
        "fault of the first": raised(lambda: ranks.first(lambda: fail(DataError("row 7")))),
        "unnamed fault before interruption": raised(
            lambda: ranks.together(lambda: fail(Interrupted()) if rank == 0 else fail(MemoryError("row 7")))
        ),
        "where": where(lambda: ranks.together(lambda: fail(DataError("row 7")) if rank == 1 else 3)),
        "garbled": raised(lambda: ranks.together(lambda: fail(SpecFaults([Fault("/seed", "is 5")])))),
        "odd": raised(lambda: ranks.together(lambda: fail(Odd("far away", 3)) if rank == 1 else 3)),
    }
    control = Control(SegmentDir(Path("nowhere")), 0, SilentJournal(), ranks)
    control.listen_to_sigterm()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    found["SIGTERM to the last"] = control.wants_to_end()
    found["listens on"] = listening_addresses()
    ranks.gather(None)  # Until both have looked.
    results.put((rank, found))


@pytest.fixture(scope="module")
def both() -> dict[int, dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    results, port = context.Queue(), free_port()
    processes = [context.Process(target=member, args=(rank, port, results)) for rank in range(2)]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(30)
        process.kill()
    return found


def test_every_rank_learns_the_same(both: dict[int, dict[str, Any]]) -> None:
    mine = [found.pop("mine") for found in (both[0], both[1])]
    assert [list(rows) for rows in mine] == [[0, 2, 4], [1, 3]]
    assert [found.pop("listens on") for found in (both[0], both[1])] == [{"0100007F"}] * 2
    assert (
        both[0]
        == both[1]
        == {
            "gather": ["of 0", "of 1"],
            "first": "of 0",
            "add": 3.0,
            "together": [0, 10],
            "fault of one": "DataError: row 7",
            "fault before interruption": "RewardError: all are NaN",
            "interruption": "Interrupted: ",
            "fault of the first": "DataError: row 7",
            "unnamed fault before interruption": "MemoryError: row 7",
            "where": True,
            "SIGTERM to the last": "stop",
            "garbled": f"{Unpicklable.__name__}: SpecFaults: {Fault('/seed', 'is 5')}",
            "odd": f"{Unpicklable.__name__}: Odd: far away",
        }
    )


def test_alone_nothing_is_told() -> None:
    assert ALONE.gather(1) == [1]
    assert ALONE.first(lambda: 2) == 2
    assert ALONE.group is None
    assert list(ALONE.mine([1, 2])) == [1, 2]
    with pytest.raises(DataError):
        ALONE.together(lambda: fail(DataError("row 7")))
