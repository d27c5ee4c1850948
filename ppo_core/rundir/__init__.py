"""The run directory: the whole contract between a trainer and whoever looks after it. A door, importable without torch.

    RUN/segment-0001/spec.json            the resolved spec, and the checkpoint that the segment starts from
    RUN/segment-0001/journal.jsonl        append-only, one event a line
    RUN/segment-0001/samples/             texts and token records of kept responses, one file an iteration
    RUN/segment-0001/logs/                what each attempt's ranks printed, and the fault of one that failed alone
    RUN/segment-0001/control/             commands for one lease token
    RUN/segment-0001/checkpoints/         iter-000020/ and so on, each whole or absent
    RUN/segment-0001/.reserve             space for the trainer's last word on a full disk, while it runs

It knows neither database nor queue. Nothing here rewrites a file in place: files are written aside, fsynced and
renamed, and the journal only grows (but for a torn last line, which is cut when a trainer starts).
"""

from ppo_core.rundir.checkpoint_files import (
    MANIFEST,
    checkpoint_bytes,
    checkpoint_iteration,
    checkpoints,
    journalled_digest,
    manifest_digest,
    new_checkpoint,
    read_manifest,
    remove_checkpoint,
    remove_leftovers,
    set_leftovers_aside,
    stored_manifest,
    verify_checkpoint,
    write_manifest,
)
from ppo_core.rundir.control import (
    SEVERITY,
    CommandKind,
    ControlCommand,
    read_commands,
    send_command,
    withdraw_command,
)
from ppo_core.rundir.event_lines import alert_line, event_line, metrics_line, number
from ppo_core.rundir.files import fsync_folder, no_space_left, reserved_space, write_atomically
from ppo_core.rundir.journal import (
    Event,
    EventType,
    ExitCode,
    Journal,
    JournalWriter,
    SilentJournal,
    all_events,
    decode_event,
    encode_event,
    has_writer,
    read_journal,
)
from ppo_core.rundir.line import LinePiece, line_to
from ppo_core.rundir.look import look_at_checkpoint
from ppo_core.rundir.older_checkpoint import checkpoint_before
from ppo_core.rundir.rank_exits import (
    RankExit,
    RankFault,
    describe_exits,
    echoes_a_rank,
    end_error,
    end_of_log,
    find_fault,
    first_lost,
)
from ppo_core.rundir.rank_group import LEAVING_GRACE_S, LOST_GRACE_S, RankGroup
from ppo_core.rundir.ranks import device_names, free_port, num_ranks, rank_environment
from ppo_core.rundir.restart import last_iteration, next_start, start_iteration
from ppo_core.rundir.segments import SegmentDir, SegmentStart, create_segment, is_unused, segment_dir, segments
from ppo_core.rundir.stored_checkpoint import StorageAwayError, check_stored, present_checkpoint, stored_checkpoint

__all__ = [
    "LEAVING_GRACE_S",
    "LOST_GRACE_S",
    "MANIFEST",
    "SEVERITY",
    "CommandKind",
    "ControlCommand",
    "Event",
    "EventType",
    "ExitCode",
    "Journal",
    "JournalWriter",
    "LinePiece",
    "RankExit",
    "RankFault",
    "RankGroup",
    "SegmentDir",
    "SegmentStart",
    "SilentJournal",
    "StorageAwayError",
    "alert_line",
    "all_events",
    "check_stored",
    "checkpoint_before",
    "checkpoint_bytes",
    "checkpoint_iteration",
    "checkpoints",
    "create_segment",
    "decode_event",
    "describe_exits",
    "device_names",
    "echoes_a_rank",
    "encode_event",
    "end_error",
    "end_of_log",
    "event_line",
    "find_fault",
    "first_lost",
    "free_port",
    "fsync_folder",
    "has_writer",
    "is_unused",
    "journalled_digest",
    "last_iteration",
    "line_to",
    "look_at_checkpoint",
    "manifest_digest",
    "metrics_line",
    "new_checkpoint",
    "next_start",
    "no_space_left",
    "num_ranks",
    "number",
    "present_checkpoint",
    "rank_environment",
    "read_commands",
    "read_journal",
    "read_manifest",
    "remove_checkpoint",
    "remove_leftovers",
    "reserved_space",
    "segment_dir",
    "segments",
    "send_command",
    "set_leftovers_aside",
    "start_iteration",
    "stored_checkpoint",
    "stored_manifest",
    "verify_checkpoint",
    "withdraw_command",
    "write_atomically",
    "write_manifest",
]
