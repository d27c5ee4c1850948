"""The run directory: torn and damaged files, one writer, exact numbers, commands for one token, hashes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_core.errors import CheckpointError, RunDirectoryError
from ppo_core.rundir import (
    ControlCommand,
    Event,
    JournalWriter,
    SegmentDir,
    SegmentStart,
    all_events,
    checkpoint_bytes,
    checkpoint_iteration,
    checkpoints,
    create_segment,
    decode_event,
    encode_event,
    is_unused,
    last_iteration,
    new_checkpoint,
    next_start,
    read_commands,
    read_journal,
    read_manifest,
    remove_checkpoint,
    remove_leftovers,
    segment_dir,
    segments,
    send_command,
    verify_checkpoint,
    write_atomically,
)
from ppo_core.rundir.journal import LONGEST_LINE

START = SegmentStart("r-1", 1, {"name": "t", "kl": {"coef": 0.1}})


@pytest.fixture
def segment(tmp_path: Path) -> SegmentDir:
    return create_segment(tmp_path / "run", START)


def run_script(text: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


# Segments


def test_a_segment_is_made_once_and_read_back(segment: SegmentDir) -> None:
    assert segment.read_start() == START
    assert create_segment(segment.path.parent, START) == segment
    assert {child.name for child in segment.path.iterdir()} == {
        "spec.json",
        "samples",
        "logs",
        "control",
        "checkpoints",
    }


def test_a_segment_with_another_spec_is_never_rewritten(segment: SegmentDir) -> None:
    with pytest.raises(RunDirectoryError, match="never rewritten"):
        create_segment(segment.path.parent, SegmentStart("r-1", 1, {"name": "other"}))
    assert segment.read_start() == START


def test_a_segment_that_can_be_listed_can_be_read(tmp_path: Path) -> None:
    """Somebody who looks while segments are made, over and over, never meets one without its spec."""
    maker = """
        import sys
        from pathlib import Path
        from ppo_core.rundir import SegmentStart, create_segment
        for number in range(1, 101):
            create_segment(Path(sys.argv[1]), SegmentStart("r", number, {}))
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(maker), str(tmp_path)])
    numbers: list[int] = []
    while process.poll() is None:
        numbers = [segment.read_start().segment for segment in segments(tmp_path)]
        assert numbers == sorted(numbers)
    assert process.returncode == 0
    assert [segment.read_start().segment for segment in segments(tmp_path)] == list(range(1, 101))


def test_a_maker_killed_half_way_leaves_no_segment_and_does_no_harm(tmp_path: Path) -> None:
    killed = """
        import os, signal, sys
        from pathlib import Path
        from ppo_core.rundir import SegmentStart, create_segment, segments
        sys.modules["ppo_core.rundir.segments"].write_atomically = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        create_segment(Path(sys.argv[1]), SegmentStart("r-1", 1, {}))
    """
    assert run_script(killed, tmp_path).returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) != []
    assert segments(tmp_path) == []
    assert is_unused(tmp_path)
    create_segment(tmp_path, START)
    assert [child.name for child in tmp_path.iterdir()] == ["segment-0001"]
    assert not is_unused(tmp_path)


def test_two_makers_at_once_agree_or_the_second_is_refused(tmp_path: Path) -> None:
    maker = """
        import sys
        from pathlib import Path
        from ppo_core.rundir import SegmentStart, create_segment
        for number in range(1, 41):
            create_segment(Path(sys.argv[1]), SegmentStart("r-1", number, {}))
    """
    command = [sys.executable, "-c", textwrap.dedent(maker), str(tmp_path)]
    makers = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(60) for process in makers] == [0, 0]
    assert sorted(child.name for child in tmp_path.iterdir()) == [f"segment-{number:04d}" for number in range(1, 41)]
    with pytest.raises(RunDirectoryError, match="never rewritten"):
        create_segment(tmp_path, SegmentStart("other", 1, {}))


def test_segments_are_ordered_as_numbers(tmp_path: Path) -> None:
    for number in (100, 9, 10000, 10):
        create_segment(tmp_path, SegmentStart("r", number, {}))
    (tmp_path / "segment-x").mkdir()
    (tmp_path / "segment-12").mkdir()
    assert [path.path.name for path in segments(tmp_path)] == [
        "segment-0009",
        "segment-0010",
        "segment-0100",
        "segment-10000",
    ]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"run_id": "r"}', "\x00", "[" * 100_000])
def test_a_damaged_spec_file_is_named(segment: SegmentDir, text: str) -> None:
    segment.spec.write_text(text, encoding="utf-8")
    with pytest.raises(RunDirectoryError, match=r"spec\.json cannot be read"):
        segment.read_start()


def test_a_failed_write_leaves_the_old_file_and_nothing_aside(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "\ud800")
    assert path.read_text(encoding="utf-8") == "old"
    assert [child.name for child in tmp_path.iterdir()] == ["x.json"]


# Journal

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


# Commands


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


# Checkpoints

CONTENTS = {
    "state.json": b'{"iteration": 5}\n',
    "policy/config.json": b"{}",
    "policy/model.safetensors": bytes(range(40)),
}


def make_checkpoint(segment: SegmentDir, iteration: int) -> Path:
    target = segment.checkpoint(iteration)
    with new_checkpoint(target) as folder:
        for name, content in CONTENTS.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
    return target


def test_a_checkpoint_is_whole_and_verifies(segment: SegmentDir) -> None:
    target = make_checkpoint(segment, 5)
    verify_checkpoint(target)
    assert set(read_manifest(target)) == set(CONTENTS)
    assert checkpoint_bytes(target) == sum(map(len, CONTENTS.values()))
    assert checkpoints(segment) == [target]


def test_checkpoints_are_ordered_as_numbers(segment: SegmentDir) -> None:
    for iteration in (100, 9, 10, 1_000_000, 99_999_999):
        make_checkpoint(segment, iteration)
    found = [checkpoint_iteration(path) for path in checkpoints(segment)]
    assert found == [9, 10, 100, 1_000_000, 99_999_999]


@pytest.mark.parametrize("name", ["iter-5", "iter-00000x", ".iter-000005.1.tmp", "iter-000005.removed", "xiter-000005"])
def test_other_names_are_no_checkpoint(segment: SegmentDir, name: str) -> None:
    make_checkpoint(segment, 5).rename(segment.checkpoints / name)
    assert checkpoints(segment) == []


def test_a_failure_while_writing_leaves_none(segment: SegmentDir) -> None:
    def fail() -> None:
        with new_checkpoint(segment.checkpoint(5)) as folder:
            (folder / "state.json").write_bytes(b"half")
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        fail()
    assert list(segment.checkpoints.iterdir()) == []


def test_a_kill_while_writing_leaves_none(segment: SegmentDir) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time, pathlib\n"
            "from ppo_core.rundir import new_checkpoint\n"
            "with new_checkpoint(pathlib.Path(sys.argv[1])) as folder:\n"
            "    (folder / 'state.json').write_bytes(b'half')\n"
            "    print('half', flush=True)\n"
            "    time.sleep(60)\n",
            str(segment.checkpoint(5)),
        ],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"half\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert checkpoints(segment) == []
    assert len(list(segment.checkpoints.iterdir())) == 1
    remove_leftovers(segment)
    assert list(segment.checkpoints.iterdir()) == []


def test_a_checkpoint_is_never_overwritten(segment: SegmentDir) -> None:
    target = make_checkpoint(segment, 5)
    with pytest.raises(CheckpointError, match="never overwritten"):
        make_checkpoint(segment, 5)
    verify_checkpoint(target)
    assert list(segment.checkpoints.iterdir()) == [target]


@pytest.mark.parametrize("name", CONTENTS)
def test_every_flipped_bit_is_found_and_its_file_named(segment: SegmentDir, name: str) -> None:
    path = make_checkpoint(segment, 5) / name
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=f"{path} has SHA-256"):
            verify_checkpoint(segment.checkpoint(5))


@pytest.mark.parametrize("name", CONTENTS)
def test_a_short_long_or_missing_file_is_found_and_named(segment: SegmentDir, name: str) -> None:
    target = make_checkpoint(segment, 5)
    path = target / name
    for content in (CONTENTS[name][:-1], CONTENTS[name] + b"\0", b""):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{path} has {len(content)} bytes"):
            verify_checkpoint(target)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path} is missing"):
        verify_checkpoint(target)


def test_a_flipped_bit_of_the_manifest_never_passes_for_other_files(segment: SegmentDir) -> None:
    """Each either fails by name, or leaves the list of files as it was (a bit of white space or of `format`)."""
    target = make_checkpoint(segment, 5)
    path = target / "manifest.json"
    good, content = read_manifest(target), path.read_bytes()
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        try:
            verify_checkpoint(target)
        except CheckpointError:
            continue
        assert read_manifest(target) == good


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"files": null}',
        '{"files": []}',
        '{"files": {}}',
        '{"files": {"a": 1}}',
        '{"files": {"a": {"sha256": "x"}}}',
        '{"files": {"a": {"sha256": "x", "bytes": "1"}}}',
        '{"files": {"../a": {"sha256": "x", "bytes": 1}}}',
        '{"files": {"/etc/passwd": {"sha256": "x", "bytes": 1}}}',
        "[" * 100_000,
        "\x00",
    ],
    ids=range(13),
)
def test_a_damaged_manifest_is_no_whole_checkpoint(segment: SegmentDir, text: str) -> None:
    target = make_checkpoint(segment, 5)
    (target / "manifest.json").write_text(text, encoding="utf-8")
    for call in (verify_checkpoint, read_manifest, checkpoint_bytes):
        with pytest.raises(CheckpointError, match="no whole checkpoint"):
            call(target)


def test_a_missing_manifest_means_no_checkpoint(segment: SegmentDir) -> None:
    target = make_checkpoint(segment, 5)
    (target / "manifest.json").unlink()
    assert checkpoints(segment) == []
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        verify_checkpoint(target)


def test_a_removed_checkpoint_is_gone_and_a_half_removed_one_is_not_seen(segment: SegmentDir) -> None:
    target = make_checkpoint(segment, 5)
    remove_checkpoint(target)
    assert list(segment.checkpoints.iterdir()) == []
    make_checkpoint(segment, 5).rename(segment.checkpoints / ".iter-000005.removed")
    assert checkpoints(segment) == []
    make_checkpoint(segment, 5)
    remove_checkpoint(segment.checkpoint(5))  # the leftover is no obstacle
    assert list(segment.checkpoints.iterdir()) == []


# Restart


def journal_of(segment: SegmentDir, iterations: range) -> None:
    writer = JournalWriter(segment.journal)
    for iteration in iterations:
        writer.append("metrics", iteration, {})
    writer.close()


def test_a_restart_at_the_journals_end_stays_in_its_segment(segment: SegmentDir) -> None:
    assert next_start(segment.path.parent) == START
    journal_of(segment, range(11))
    make_checkpoint(segment, 9)
    make_checkpoint(segment, 10)
    assert next_start(segment.path.parent) == START


def test_a_restart_behind_the_journals_end_opens_a_new_segment(segment: SegmentDir) -> None:
    journal_of(segment, range(13))
    make_checkpoint(segment, 9)
    target = make_checkpoint(segment, 10)
    start = next_start(segment.path.parent)
    assert (start.segment, start.checkpoint, start.spec) == (2, str(target), START.spec)


def test_a_restart_before_any_checkpoint_begins_again_in_a_new_segment(segment: SegmentDir) -> None:
    journal_of(segment, range(3))
    start = next_start(segment.path.parent)
    assert (start.segment, start.checkpoint) == (2, None)


def test_a_restart_of_a_segment_that_began_from_a_checkpoint_goes_back_to_that(segment: SegmentDir) -> None:
    target = make_checkpoint(segment, 10)
    second = create_segment(segment.path.parent, SegmentStart("r-1", 2, {}, str(target)))
    assert next_start(segment.path.parent).segment == 2
    journal_of(second, range(11, 13))
    start = next_start(segment.path.parent)
    assert (start.segment, start.checkpoint) == (3, str(target))


def test_a_run_without_a_segment_has_nothing_to_restart(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="no segment"):
        next_start(tmp_path)
