"""Several ranks of the scripted trainer: they meet over sockets in every iteration, as real ones do in collectives."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from typing import Any

from ppo_core.rundir import SegmentDir, write_atomically

RANK = int(os.environ.get("RANK", "0"))
SIZE = int(os.environ.get("WORLD_SIZE", "1"))


class Meeting:
    """All ranks of an attempt. What breaks it is an OSError: a connection that ended, or a wait beyond `wait_s`."""

    def __init__(self, wait_s: float) -> None:
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if RANK:
            self._lines = [_connect(address, wait_s).makefile("rw", encoding="ascii", newline="\n")]
        else:
            with socket.create_server(address, backlog=SIZE) as server:
                server.settimeout(60)
                others = [server.accept()[0] for _ in range(1, SIZE)]
            for other in others:
                other.settimeout(wait_s)
            self._lines = [other.makefile("rw", encoding="ascii", newline="\n") for other in others]

    def tell(self, word: str) -> None:
        """Rank 0: wait until all others are there, and tell them what comes."""
        for lines in self._lines:
            if lines.readline() != "here\n":
                raise ConnectionResetError("a rank left")
        for lines in self._lines:
            print(word, file=lines, flush=True)

    def hear(self) -> list[str]:
        """Any other rank: be there, and hear what comes."""
        print("here", file=self._lines[0], flush=True)
        words = self._lines[0].readline().split()
        if not words:
            raise ConnectionResetError("rank 0 left")
        return words


def _connect(address: tuple[str, int], wait_s: float) -> socket.socket:
    deadline = time.monotonic() + 60
    while True:
        try:
            connection = socket.create_connection(address)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            connection.settimeout(wait_s)
            return connection


def follow(meeting: Meeting, segment: SegmentDir, attempt: int, knobs: dict[str, Any]) -> int:
    """Be a rank other than 0 until rank 0 says that the run is at rest; returns the code to leave with."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 hears it too, and decides for all
    while True:
        word, number = meeting.hear()
        if word == "leave":
            time.sleep(knobs.get("linger_s", 0))
            return int(number)
        if knobs.get("rank") == RANK and attempt <= knobs["attempts"]:
            misbehave(int(number), segment, attempt, knobs)


def misbehave(iteration: int, segment: SegmentDir, attempt: int, knobs: dict[str, Any]) -> None:
    """What the script has this rank do in this iteration, alone."""
    if knobs.get("die_at") == iteration:
        os.kill(os.getpid(), signal.SIGKILL)
    if knobs.get("freeze_at") == iteration:
        os.kill(os.getpid(), signal.SIGSTOP)
    if knobs.get("fault_at") == iteration:
        fault = {"code": "data", "message": "row 7 is empty", "hint": "fill it", "traceback": "T", "exit_code": 65}
        write_atomically(segment.fault(attempt, RANK), json.dumps(fault))
        os._exit(65)
    leave = knobs.get("leave_at")
    if leave and leave[0] == iteration:
        print(f"rank {RANK} cannot go on", file=sys.stderr, flush=True)
        os._exit(leave[1])
