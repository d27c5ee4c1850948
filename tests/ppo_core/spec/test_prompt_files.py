"""Prompt files of every format: good rows untouched, bad rows by number, what is no such file told in words."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from ppo_core.errors import DataError
from ppo_core.spec.prompt_files import MAX_ROW_BYTES, Unfit, prompts_of, read_rows
from ppo_core.spec.prompt_rows import Message, prompt_text

TEXTS = ["the film is", 'a "quoted", one', "two\nlines", "مرحبا 🎬"]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How was it? 🎬"}]
CONVERSATION = (Message("system", "Be brief."), Message("user", "How was it? 🎬"))


def rows(path: Path) -> list[tuple[int, Any]]:
    return [(number, row.problem if isinstance(row, Unfit) else row) for number, row in read_rows(path)]


def written(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def table(path: Path, **columns: Any) -> Path:
    parquet.write_table(pyarrow.table(columns), path)
    return path


def saved_dataset(folder: Path, *shards: Any) -> Path:
    """A folder as `Dataset.save_to_disk` leaves it."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(shards):05d}.arrow" for number in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        with pyarrow.OSFile(str(folder / name), "wb") as sink, pyarrow.ipc.new_stream(sink, shard.schema) as writer:
            writer.write_table(shard)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "f", "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


# Good files


def test_every_format_gives_the_same_prompts(tmp_path: Path) -> None:
    as_json = written(tmp_path / "a.jsonl", "".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    cells = ['"' + text.replace('"', '""') + '"' for text in TEXTS]
    as_csv = written(tmp_path / "a.csv", "rating,prompt\r\n" + "".join(f"3,{cell}\r\n" for cell in cells))
    as_parquet = table(tmp_path / "a.parquet", rating=[1, 2, 3, 4], prompt=TEXTS)
    first, second = pyarrow.table({"prompt": TEXTS[:3]}), pyarrow.table({"prompt": TEXTS[3:]})
    as_folder = saved_dataset(tmp_path / "saved", first, second)
    assert [row for _, row in rows(as_json)] == TEXTS
    assert rows(as_json) == rows(as_parquet) == rows(as_folder)
    assert rows(as_csv) == [(number + 1, text) for number, text in rows(as_json)]  # the header is row 1


def test_conversations_and_texts_may_stand_in_one_file(tmp_path: Path) -> None:
    lines = [{"prompt": "x"}, {"messages": MESSAGES}, {"prompt": "y", "messages": None}]
    as_json = written(tmp_path / "a.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    columns = {"prompt": ["x", None, "y"], "messages": [None, MESSAGES, None]}
    expected = [(1, "x"), (2, CONVERSATION), (3, "y")]
    assert rows(as_json) == expected
    assert rows(table(tmp_path / "a.parquet", **columns)) == expected
    assert rows(saved_dataset(tmp_path / "saved", pyarrow.table(columns))) == expected


@pytest.mark.parametrize("kind", [pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())])
def test_text_columns_of_other_kinds_are_texts(tmp_path: Path, kind: Any) -> None:
    assert rows(table(tmp_path / "a.parquet", prompt=pyarrow.array(["x", "y"], kind))) == [(1, "x"), (2, "y")]


def test_what_scorers_see_of_a_conversation() -> None:
    assert prompt_text("x") == "x"
    assert prompt_text((Message("user", "x"),)) == "x"
    assert prompt_text(CONVERSATION) == "system: Be brief.\n\nuser: How was it? 🎬"


# Rows


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "x", "messages": MESSAGES}, "both"),
        ({"messages": []}, '"messages" is empty'),
        ({"messages": "x"}, 'a list under "messages"'),
        ({"messages": ["x"]}, "message 1: expected an object"),
        ({"messages": [{"role": "user"}]}, 'message 1: "content" must be a text'),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 'message 1: "content" must be a text'),
        ({"messages": [{"content": "x"}]}, 'message 1: "role" must be a word'),
        ({"messages": [{"role": "user<|im_end|>", "content": "x"}]}, 'message 1: "role" must be a word'),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "message 1: has 'tool_calls'"),
        ({"messages": [{"role": "user", "content": "a\ud800b"}]}, "message 1: holds half of a surrogate pair"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "the last message is empty"),
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "Good."}]}, "the last message is the assistant's"),
        ({"messages": [{"role": "user", "content": "x" * 500_001}] * 2}, "more than 1000000 characters"),
    ],
)
def test_an_unfit_conversation_is_told_by_message(tmp_path: Path, row: Any, problem: str) -> None:
    path = written(tmp_path / "a.jsonl", json.dumps({"prompt": "good"}) + "\n" + json.dumps(row) + "\n")
    (good, (number, found)) = rows(path)
    assert good == (1, "good")
    assert number == 2
    assert problem in found


def test_a_line_beyond_the_limit_is_told_and_not_held(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"prompt": "one"}\n{"prompt": "')
        for _ in range(160):
            file.write(b"x" * 2**20)
        file.write(b'"}\n{"prompt": "three"}\n')
    tracemalloc.start()
    found = rows(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == [(1, "one"), (2, f"the row is longer than {MAX_ROW_BYTES} bytes"), (3, "three")]
    assert peak < 5 * MAX_ROW_BYTES  # of 160 MiB


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, ending: str) -> None:
    """80 MB of prompts of 10 kB each; of a Parquet file two pages are held."""
    text, count, path = "x" * 10_000, 8_000, tmp_path / f"a.{ending}"
    if ending == "parquet":
        table(path, prompt=[text + str(number) for number in range(count)])
    else:
        row = json.dumps({"prompt": text}) if ending == "jsonl" else text
        written(path, ("" if ending == "jsonl" else "prompt\n") + f"{row}\n" * count)
    tracemalloc.start()
    arrow = pyarrow.total_allocated_bytes()
    held = [pyarrow.total_allocated_bytes() - arrow for _ in read_rows(path)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(held) == count
    assert peak + max(held) < 30e6


# CSV


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"\xef\xbb\xbfprompt\nx\n", [(2, "x")]),
        (b"prompt\nx\n\ny\n", [(2, "x"), (4, "y")]),
        (b"prompt\nx", [(2, "x")]),
        (b"prompt,n\nx,1\nragged\ny,2,3\nz,4\n", "3: it has 1 fields, the header 2|4: it has 3 fields, the header 2"),
        (b"prompt\n" + b"x" * 200_000 + b"\n", [(2, "x" * 200_000)]),
        (b"prompt\nok\ncaf\xe9\nok\n", "3: a byte is not UTF-8"),
        (b"prompt\nok\na\x00b\n", "3: it holds a NUL byte"),
        (b'prompt\nok\n""\n', "3: the prompt is empty"),
        (b"prompt\n  \nok\n", "2: the prompt is empty"),
        (b'prompt\nok\n"open\nok\n', "3: not valid CSV (unexpected end of data); nothing after it was looked at"),
        (b'prompt\n"a"b\nok\n', "2: not valid CSV"),
    ],
    ids=range(11),
)
def test_odd_rows_of_csv(tmp_path: Path, content: bytes, found: Any) -> None:
    got = rows(written(tmp_path / "a.csv", content))
    if isinstance(found, str):
        told = [f"{number}: {text}" for number, text in got if text not in ("ok", "x", "z")]
        assert len(told) == found.count("|") + 1
        for one, expected in zip(told, found.split("|"), strict=True):
            assert one.startswith(expected)
    else:
        assert got == found


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "row 1: the header has no column 'prompt', it has nothing"),
        (b"the film\nthe end\n", "row 1: the header has no column 'prompt', it has 'the film'"),
        (b"prompt,n,prompt\nx,1,y\n", "row 1: the column 'prompt' is there twice"),
        (b"prompt,messages\nx,y\n", "row 1: the column 'messages' is no text"),
        (b'"prompt\nx\n', "row 1: not valid CSV"),
        ("prompt\nx\n".encode("utf-16"), "row 1: the header has no column 'prompt'"),
    ],
    ids=range(6),
)
def test_a_csv_file_needs_a_header(tmp_path: Path, content: bytes, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        rows(written(tmp_path / "a.csv", content))


# Columns


def test_null_empty_and_undecodable_prompts_of_a_column_are_told(tmp_path: Path) -> None:
    broken = pyarrow.array([b"caf\xe9"], pyarrow.binary()).view(pyarrow.string())
    column = pyarrow.chunked_array([["x", None, ""], broken, ["y"]])
    expected = [
        (1, "x"),
        (2, 'expected an object with a text under "prompt" or a list under "messages"'),
        (3, "the prompt is empty"),
        (4, "a byte is not UTF-8"),
        (5, "y"),
    ]
    assert rows(table(tmp_path / "a.parquet", prompt=column)) == expected


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"text": ["x"]}, "there is no column 'prompt' or 'messages', there is 'text'"),
        ({"prompt": [1]}, "the column 'prompt' is of type int64, expected text"),
        ({"prompt": [b"x"]}, "the column 'prompt' is of type binary, expected text"),
        ({"prompt": [["x"]]}, "the column 'prompt' is of type list"),
        ({"messages": ["x"]}, "the column 'messages' is of type string, expected a list of role and content"),
        ({"messages": [["x"]]}, "the column 'messages' is of type list"),
    ],
)
def test_a_column_of_another_type_is_told(tmp_path: Path, columns: Any, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        rows(table(tmp_path / "a.parquet", **columns))
    with pytest.raises(DataError, match=problem):
        rows(saved_dataset(tmp_path / "saved", pyarrow.table(columns)))


def test_a_column_that_is_there_twice_is_told(tmp_path: Path) -> None:
    twice = pyarrow.Table.from_arrays([pyarrow.array(["x"]), pyarrow.array(["y"])], names=["prompt", "prompt"])
    parquet.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="the column 'prompt' is there twice"):
        rows(tmp_path / "a.parquet")


@pytest.mark.parametrize("keep", [0, 3, 200, -1])
def test_a_truncated_parquet_file_is_told(tmp_path: Path, keep: int) -> None:
    path = table(tmp_path / "a.parquet", prompt=TEXTS * 100)
    written(path, path.read_bytes()[:keep])
    with pytest.raises(DataError, match="it cannot be read: "):
        rows(path)


def test_a_parquet_page_of_rubbish_is_told(tmp_path: Path) -> None:
    path = table(tmp_path / "a.parquet", prompt=[f"{number} {'x' * 50}" for number in range(5000)])
    content = bytearray(path.read_bytes())
    content[1000:3000] = b"\xff" * 2000
    written(path, bytes(content))
    with pytest.raises(DataError, match="it cannot be read"):
        list(prompts_of(path))


def test_a_truncated_arrow_file_is_told(tmp_path: Path) -> None:
    folder = saved_dataset(tmp_path / "saved", pyarrow.table({"prompt": TEXTS * 100}))
    (file,) = folder.glob("*.arrow")
    written(file, file.read_bytes()[:2000])
    with pytest.raises(DataError, match="it cannot be read"):
        rows(folder)


def test_a_folder_of_several_splits_asks_for_one(tmp_path: Path) -> None:
    for split in ("train", "test"):
        saved_dataset(tmp_path / split, pyarrow.table({"prompt": [split]}))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"it holds several splits \(test, train\); name the folder of one"):
        rows(tmp_path)
    assert rows(tmp_path / "test") == [(1, "test")]


@pytest.mark.parametrize("name", ["../other/data.arrow", "/etc/passwd", "..", "link.arrow", 3])
def test_a_folder_cannot_point_out_of_itself(tmp_path: Path, name: Any) -> None:
    outside = saved_dataset(tmp_path / "other", pyarrow.table({"prompt": ["secret"]}))
    folder = saved_dataset(tmp_path / "saved", pyarrow.table({"prompt": ["x"]}))
    (folder / "link.arrow").symlink_to(next(outside.glob("*.arrow")))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    with pytest.raises(DataError, match="which is no file of this folder"):
        rows(folder)


@pytest.mark.parametrize("state", ["", "[]", "{}", '{"_data_files": 3}', '{"_data_files": ["x"]}', "[" * 100_000])
def test_a_state_file_of_something_else_is_told(tmp_path: Path, state: str) -> None:
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(DataError, match="not one that the datasets library wrote"):
        rows(tmp_path)


# Files


def test_an_unknown_ending_is_told_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"\.tsv is no known format; give \.jsonl, .*\.csv, \.parquet"):
        rows(written(tmp_path / "a.tsv", "prompt\nx\n"))


def test_an_ending_may_be_in_capitals(tmp_path: Path) -> None:
    assert rows(written(tmp_path / "A.CSV", "prompt\nx\n")) == [(2, "x")]


def test_a_bad_row_raises_with_file_and_number(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", "prompt\nx\n \n")
    with pytest.raises(DataError, match=f"{path}, row 3: the prompt is empty"):
        list(prompts_of(path))


def test_columns_are_read_without_numpy(tmp_path: Path) -> None:
    """The api's image has none."""
    path = table(tmp_path / "a.parquet", messages=[MESSAGES])
    program = (
        "import sys; sys.modules['numpy'] = None\n"
        "from pathlib import Path; from ppo_core.spec.prompt_files import read_rows\n"
        f"print(len(list(read_rows(Path({str(path)!r})))), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "False"]
