"""Commands reach the trainer of one lease token, whole and in order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ppo_core.rundir import (
    ControlCommand,
    SegmentDir,
    read_commands,
    segment_dir,
    send_command,
)


def test_commands_are_read_by_token_oldest_first(segment: SegmentDir) -> None:
    for number, (id, token) in enumerate([("c-z", 7), ("c-a", 7), ("c-old", 6), ("c-new", 8), ("c-m", 77)]):
        send_command(segment, ControlCommand(id, "checkpoint", token))
        path = next(segment.control.glob(f"*-{id}.json"))
        os.utime(path, ns=(number, number))
    assert [command.id for command in read_commands(segment, 7)] == ["c-z", "c-a"]
    assert [command.id for command in read_commands(segment, 8)] == ["c-new"]
    assert read_commands(segment, 9) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"id":"c","kind":"stop","token":8}',
        '{"id":"c","kind":"explode","token":7}',
        "[" * 100_000,
        "\x00",
    ],
    ids=range(7),
)
def test_a_file_that_is_no_command_for_this_token_is_ignored(segment: SegmentDir, text: str) -> None:
    send_command(segment, ControlCommand("c-1", "stop", 7))
    (segment.control / "00000007-x.json").write_text(text, encoding="utf-8")
    assert [command.id for command in read_commands(segment, 7)] == ["c-1"]


def test_a_command_half_written_is_not_seen(segment: SegmentDir) -> None:
    (segment.control / ".00000007-c-1.json.99.tmp").write_text('{"id":"c-1","kind":"stop","token":7}', encoding="utf-8")
    assert read_commands(segment, 7) == []


def test_no_control_folder_means_no_command(tmp_path: Path) -> None:
    assert read_commands(segment_dir(tmp_path, 1), 1) == []
