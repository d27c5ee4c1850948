"""Bad rows of prompts: api, trainer and `ppo train` refuse the same ones, in the same words."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pytest
import yaml
from pyarrow import parquet

from api.schemas import SpecBody
from api.specs import accept_spec
from ppo.train import prepare
from ppo_core.main import run_segment
from ppo_core.rundir import ExitCode
from ppo_core.spec import EngineHosts, RewardHosts, SpecFaults
from tests.ppo_core.toy_run import journal, make_toy, toy_segment

GOOD = ["the film 🎬", "مرحبا", "a bad film"]
JSON_ROWS = [b'{"prompt": "caf\xe9"}', b'{"prompt": "ok\\ud800bad"}', b'{"prompt": ""}', b'{"prompt": " \\t"}']
GIANT = b'{"prompt": "' + b"x" * 5_000_000 + b'"}'


def bad_file(folder: Path, kind: str) -> Path:
    """T41's rows behind three good ones, as far as the format can hold them."""
    path = folder / f"bad.{kind}"
    if kind == "jsonl":
        good = [json.dumps({"prompt": text}, ensure_ascii=False).encode() for text in GOOD]
        path.write_bytes(b"\n".join([*good, *JSON_ROWS, GIANT]) + b"\n")
    elif kind == "csv":
        good = [text.encode() for text in GOOD]
        path.write_bytes(b"\n".join([b"prompt", *good, b"caf\xe9", b'""', b" ", b"a,b", b"x" * 5_000_000]) + b"\n")
    else:
        broken = pyarrow.array([b"caf\xe9"], pyarrow.binary()).view(pyarrow.string())
        column = pyarrow.chunked_array([GOOD, broken, ["", " ", None, "x" * 5_000_000]])
        parquet.write_table(pyarrow.table({"prompt": column}), path)
    return path


@pytest.mark.parametrize(("kind", "rows"), [("jsonl", range(4, 9)), ("csv", range(5, 10)), ("parquet", range(4, 9))])
def test_api_trainer_and_command_line_refuse_the_same_rows(tmp_path: Path, kind: str, rows: range) -> None:
    """T41: openai/tiktoken#82. Good rows, emoji and right-to-left text among them, are not named."""
    spec = make_toy(tmp_path)
    spec["data"]["prompts"] = str(bad_file(tmp_path, kind))
    with pytest.raises(SpecFaults) as submitted:
        accept_spec(SpecBody(spec=spec), [tmp_path], RewardHosts(), EngineHosts())
    told = [str(fault) for fault in submitted.value.faults]
    assert [fault.split(": ")[1] for fault in told] == [f"bad.{kind}, row {number}" for number in rows]
    file = tmp_path / "spec.yaml"
    file.write_text(yaml.safe_dump(spec))
    with pytest.raises(SpecFaults) as prepared:
        prepare(file, [], tmp_path / "train", resume=False)
    assert [str(fault) for fault in prepared.value.faults] == told
    segment = toy_segment(tmp_path / "run", spec)
    assert run_segment(segment, token=0, attempt=1) == ExitCode.BAD_SPEC
    assert journal(segment, "end")[0].payload["error"]["message"] == "; ".join(told)
