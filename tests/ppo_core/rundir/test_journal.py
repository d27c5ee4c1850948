"""The journal: exact numbers, torn and damaged lines, one writer, readers that follow by byte."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_core.errors import RunDirectoryError
from ppo_core.rundir import (
    Event,
    JournalWriter,
    SegmentDir,
    all_events,
    decode_event,
    encode_event,
    last_iteration,
    read_journal,
)
from ppo_core.rundir.journal import LONGEST_LINE
from tests.ppo_core.rundir.segment_files import run_script

numbers = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-(2**60), 2**60) | st.none()


def same(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    return type(left) is type(right) and bool(left == right)


@given(st.dictionaries(st.text(max_size=20), numbers))
def test_metrics_come_back_exactly_non_finite_ones_included(payload: dict[str, Any]) -> None:
    line = encode_event(Event(1, "metrics", 2, "t", payload))
    assert line.isascii()
    assert line.count("\n") == 1
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not strict JSON"))
    found = decode_event(line).payload
    assert found.keys() == payload.keys()
    assert all(same(found[name], payload[name]) for name in payload)


def test_the_line_says_which_numbers_were_not_finite() -> None:
    payload = {"a": math.nan, "b": [1.0, math.inf], "c": {"d": -math.inf}, "e": 2.0}
    fields = json.loads(encode_event(Event(1, "note", 0, "t", payload)))
    assert fields["payload"] == {"a": None, "b": [1.0, None], "c": {"d": None}, "e": 2.0}
    assert fields["nonfinite"] == {"a": "NaN", "b.1": "Infinity", "c.d": "-Infinity"}


@pytest.mark.parametrize("text", ["line\nbreak\r\u2028\x00", "half \ud83d", "\U0001f600"])
def test_any_text_is_one_line_and_comes_back(text: str) -> None:
    line = encode_event(Event(1, "note", 0, "t", {"message": text}))
    assert len(line.splitlines()) == 1
    assert decode_event(line).payload["message"] == text


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff",
        b"\x00\x00",
        b'{"seq":1',
        b'{"seq":"1","type":"note","iteration":1,"time":"","payload":{}}',
        b'{"seq":1,"type":"note","iteration":1,"time":"","payload":null}',
        b'{"seq":1,"type":"note","iteration":1,"time":"","payload":{},"more":1}',
        b'{"seq":1,"type":"note","iteration":1,"time":"","payload":{"a":null},"nonfinite":{"a":"x"}}',
        b'{"seq":1,"type":"note","iteration":1,"time":"","payload":{"a":null},"nonfinite":{"a":1' + b"0" * 400 + b"}}",
        b'{"seq":1,"type":"note","iteration":2147483648,"time":"","payload":{}}',
        b'{"seq":1,"type":"note","iteration":-1,"time":"","payload":{}}',
        b'{"seq":1,"type":7,"iteration":1,"time":"","payload":{}}',
        b"[" * 100_000,
    ],
    ids=range(16),
)
def test_what_is_no_journal_line_is_refused(line: bytes) -> None:
    with pytest.raises(RunDirectoryError, match="not a journal line"):
        decode_event(line)


def test_a_line_without_an_end_is_refused_however_it_is_read(segment: SegmentDir) -> None:
    """Whoever reads it at each look would come to nothing else."""
    segment.journal.write_bytes(b"x" * (LONGEST_LINE + 2))
    for max_bytes in (2**20, 2**30):
        with pytest.raises(RunDirectoryError, match="line of more than"):
            read_journal(segment.journal, 0, max_bytes)
    segment.journal.write_bytes(b"x" * LONGEST_LINE)
    assert read_journal(segment.journal) == ([], 0)


def test_seq_counts_from_one_and_goes_on_after_a_restart(segment: SegmentDir) -> None:
    writer = JournalWriter(segment.journal)
    assert [writer.append("note", 0, {}).seq for _ in range(3)] == [1, 2, 3]
    writer.close()
    again = JournalWriter(segment.journal)
    assert again.last is not None
    assert again.last.seq == 3
    assert again.append("note", 0, {}).seq == 4
    again.close()
    assert [event.seq for event in all_events(segment.journal)] == [1, 2, 3, 4]


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_torn_last_line_is_not_read_and_cut_at_start(segment: SegmentDir, cut: int) -> None:
    writer = JournalWriter(segment.journal)
    for number in range(3):
        writer.append("note", number, {"message": "x" * 30})
    writer.close()
    whole = segment.journal.read_bytes()
    segment.journal.write_bytes(whole[:-cut])
    events, offset = read_journal(segment.journal)
    assert [event.seq for event in events] == [1, 2]
    writer = JournalWriter(segment.journal)
    assert segment.journal.stat().st_size == offset
    assert writer.append("end", 0, {}).seq == 3
    writer.close()
    assert [event.type for event in all_events(segment.journal)] == ["note", "note", "end"]


def test_a_reader_follows_by_byte_offset(segment: SegmentDir) -> None:
    writer = JournalWriter(segment.journal)
    assert read_journal(segment.path / "absent.jsonl") == ([], 0)
    offset = 0
    for number in range(1, 5):
        writer.append("note", number, {})
        events, offset = read_journal(segment.journal, offset)
        assert [event.iteration for event in events] == [number]
    assert read_journal(segment.journal, offset) == ([], offset)
    writer.close()


@pytest.mark.parametrize("max_bytes", [1, 50, 100, 101, 4096])
def test_a_line_longer_than_the_limit_is_read_whole(segment: SegmentDir, max_bytes: int) -> None:
    writer = JournalWriter(segment.journal)
    for number in range(5):
        writer.append("note", number, {"message": "x" * 300 * number})
    writer.close()
    found, offset = [], 0
    while True:
        events, offset = read_journal(segment.journal, offset, max_bytes)
        if not events:
            break
        found += events
    assert [event.iteration for event in found] == [0, 1, 2, 3, 4]


def test_a_second_writer_is_refused_here_and_in_another_process(segment: SegmentDir) -> None:
    writer = JournalWriter(segment.journal)
    writer.append("note", 0, {})
    with pytest.raises(RunDirectoryError, match="another trainer"):
        JournalWriter(segment.journal)
    script = "import sys, pathlib, ppo_core.rundir as r; r.JournalWriter(pathlib.Path(sys.argv[1]))"
    assert "another trainer" in run_script(script, segment.journal).stderr
    writer.close()
    JournalWriter(segment.journal).close()
    assert len(list(all_events(segment.journal))) == 1


@pytest.mark.parametrize("seqs", [[2], [1, 3], [1, 1], [1, 2, 2]])
def test_a_gap_or_a_double_is_refused(segment: SegmentDir, seqs: list[int]) -> None:
    segment.journal.write_text("".join(encode_event(Event(n, "note", 0, "t", {})) for n in seqs), encoding="ascii")
    with pytest.raises(RunDirectoryError, match="lines were lost or added"):
        JournalWriter(segment.journal)


def test_a_damaged_whole_line_is_refused_and_the_file_let_go(segment: SegmentDir) -> None:
    segment.journal.write_bytes(b"rubbish\n")
    for _ in range(2):
        with pytest.raises(RunDirectoryError, match="not a journal line"):
            JournalWriter(segment.journal)
    assert segment.journal.read_bytes() == b"rubbish\n"


def test_a_write_that_fails_half_way_leaves_no_trace(segment: SegmentDir) -> None:
    """A real limit on the file's size stands for a full disk: the write stops in the middle of a line."""
    done = run_script(
        """
        import pathlib, resource, signal, sys
        from ppo_core.rundir import JournalWriter
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        writer = JournalWriter(pathlib.Path(sys.argv[1]))
        writer.append("note", 1, {})
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
        try:
            writer.append("note", 2, {"message": "x" * 1000})
        except OSError as error:
            print("failed", error.errno)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        writer.append("end", 3, {})
        """,
        segment.journal,
    )
    assert done.stdout.startswith("failed"), done.stderr
    assert [(event.seq, event.iteration) for event in all_events(segment.journal)] == [(1, 1), (2, 3)]


def test_the_last_iteration_is_the_highest_with_metrics(segment: SegmentDir) -> None:
    assert last_iteration(segment) == 0
    writer = JournalWriter(segment.journal)
    for type, iteration in (("metrics", 9), ("metrics", 10), ("phase", 11)):
        writer.append(type, iteration, {})  # type: ignore[arg-type]
    writer.close()
    assert last_iteration(segment) == 10
