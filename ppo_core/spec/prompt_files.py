"""Reads prompts row by row from JSON Lines, CSV, Parquet, and folders that the `datasets` library saved.

Rows are streamed: memory does not grow with the file, and of a line that is too long only the beginning is held. It
knows no tokenizer and loads no torch.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_core.errors import DataError
from ppo_core.spec.prompt_rows import Prompt, has_lone_surrogate, prompt_of

MAX_ROW_BYTES = 16 * 2**20  # one row with everything that stands beside its prompt
_BATCH_ROWS = 64  # rows of a column file that are held at once
_FORMATS = ".jsonl, .ndjson or .json (an object a line), .csv, .parquet, or a folder saved by the datasets library"


@dataclass(frozen=True)
class Unfit:
    """Why a row is no prompt."""

    problem: str


Row = tuple[int, Prompt | Unfit]  #: a row's number in its file, from 1, and what it holds


def read_rows(path: Path) -> Iterator[Row]:
    """Every row of a prompt file or folder, the unfit ones with their problem. Blank lines are passed over.

    A row's number is its line in JSON Lines, its record in CSV (the header is row 1), its place from 1 otherwise.

    Raises:
        DataError: the file cannot be read as what its name says it is; the message names no path.
    """
    try:
        yield from _reader(path)(path)
    except OSError as error:
        raise DataError(f"it cannot be read: {error}") from error


def prompts_of(path: Path) -> Iterator[tuple[int, Prompt]]:
    """The prompts of a file or folder, each with its row's number.

    Raises:
        DataError: a row is unfit, or the file cannot be read; file and row are named.
    """
    try:
        for number, prompt in read_rows(path):
            if isinstance(prompt, Unfit):
                raise DataError(f"row {number}: {prompt.problem}")
            yield number, prompt
    except DataError as error:
        raise DataError(f"{path}, {error}") from error


def _reader(path: Path) -> Callable[[Path], Iterator[Row]]:
    if path.is_dir():
        return _datasets_folder
    if path.exists() and not path.is_file():
        raise DataError("it is neither a file nor a folder")
    match path.suffix.lower():
        case ".jsonl" | ".ndjson" | ".json":
            return _json_lines
        case ".csv":
            return _csv
        case ".parquet":
            return _parquet
    raise DataError(f"{path.suffix or 'a name without ending'} is no known format; give {_FORMATS}")


def _checked(number: int, row: Any) -> Row:
    try:
        return number, prompt_of(row)
    except ValueError as problem:
        return number, Unfit(str(problem))


# JSON Lines


def read_json_row(line: bytes) -> Prompt:
    """The prompt of one line of a JSON Lines file.

    Raises:
        ValueError: the row is unfit; the message says why.
    """
    if len(line) > MAX_ROW_BYTES:
        raise ValueError(f"the row is longer than {MAX_ROW_BYTES} bytes")
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({error})") from error
    return prompt_of(row)


def _json_lines(path: Path) -> Iterator[Row]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            yield number, read_json_row(line)
        except ValueError as problem:
            yield number, Unfit(str(problem))


def _lines(path: Path) -> Iterator[bytes]:
    """Lines, of which no more than a byte above the longest row is kept."""
    with path.open("rb") as file:
        while line := file.readline(MAX_ROW_BYTES + 1):
            rest = line
            while len(rest) > MAX_ROW_BYTES and not rest.endswith(b"\n"):
                rest = file.readline(MAX_ROW_BYTES + 1)
            yield line


# CSV


def _csv(path: Path) -> Iterator[Row]:
    # The library's own limit is 128 KiB a field, and there is only one for the whole process.
    csv.field_size_limit(MAX_ROW_BYTES)
    # A byte that is not UTF-8 becomes half a surrogate pair, which valid UTF-8 never holds.
    lines = (line.decode("utf-8", "surrogateescape") for line in _lines(path))
    records = _records(csv.reader(_without_bom(lines), strict=True))
    _, header = next(records, (1, []))
    if isinstance(header, Unfit):
        raise DataError(f"row 1: {header.problem}")
    _check_header(header)
    for number, fields in records:
        if isinstance(fields, Unfit):
            yield number, fields
        elif fields:
            yield number, _csv_prompt(header, fields)


def _records(reader: Iterator[list[str]]) -> Iterator[tuple[int, list[str] | Unfit]]:
    number = 0
    while True:
        number += 1
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:  # A stray quote takes the next lines in, so what follows cannot be told apart.
            yield number, Unfit(f"not valid CSV ({error}); nothing after it was looked at")
            return
        yield number, fields


def _without_bom(lines: Iterator[str]) -> Iterator[str]:
    """The same lines without the byte-order mark that spreadsheets put in front."""
    for line in lines:
        yield line.removeprefix("\ufeff")
        break
    yield from lines


def _check_header(header: Sequence[str]) -> None:
    if "prompt" not in header:
        shown = ", ".join(repr(name[:40]) for name in header[:8]) or "nothing"
        raise DataError(f"row 1: the header has no column 'prompt', it has {shown}")
    repeated = [name for name in header if header.count(name) > 1]
    if repeated:
        raise DataError(f"row 1: the column {repeated[0]!r} is there twice; give each column a name of its own")
    if "messages" in header:
        raise DataError("row 1: the column 'messages' is no text; give conversations as JSON Lines or Parquet")


def _csv_prompt(header: Sequence[str], fields: Sequence[str]) -> Prompt | Unfit:
    if len(fields) != len(header):
        return Unfit(f"it has {len(fields)} fields, the header {len(header)}")
    for field in fields:
        if has_lone_surrogate(field):
            return Unfit("a byte is not UTF-8")
        if "\x00" in field:  # The mark of another encoding, UTF-16 first: whoever means NUL can say so in JSON.
            return Unfit("it holds a NUL byte, which is no text in CSV")
    return _checked(0, {"prompt": fields[header.index("prompt")]})[1]


# Parquet, and Arrow files in a folder. pyarrow takes a tenth of a second to load, so only they load it.


def _parquet(path: Path) -> Iterator[Row]:
    from pyarrow import parquet

    def batches() -> Iterator[Any]:
        # Not buffered ahead: a row group may be as large as the file.
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**20) as file:
            wanted = _wanted_columns(file.schema_arrow)
            yield from file.iter_batches(batch_size=_BATCH_ROWS, columns=wanted, use_threads=False)

    yield from _column_rows(batches())


def _datasets_folder(folder: Path) -> Iterator[Row]:
    import pyarrow

    def batches() -> Iterator[Any]:
        for file in _arrow_files(folder):
            with pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_stream(source) as stream:
                wanted = _wanted_columns(stream.schema)
                for batch in stream:
                    batch.validate(full=True)  # Offsets of a damaged file would be followed to wherever they point.
                    yield batch.select(wanted)

    yield from _column_rows(batches())


def _arrow_files(folder: Path) -> list[Path]:
    """The Arrow files of a folder, in the order that the `datasets` library noted when it saved it."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.parent.name for path in folder.glob("*/state.json"))
        raise DataError(f"it holds several splits ({', '.join(splits)}); name the folder of one of them")
    try:
        state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        names = [file["filename"] for file in state["_data_files"]]
    except FileNotFoundError as error:
        raise DataError("it is a folder without state.json, so not one that the datasets library saved") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError("its state.json is not one that the datasets library wrote") from error
    for name in names:
        # Only the folder itself was checked to lie where files may be read.
        inside = isinstance(name, str) and re.fullmatch(r"[\w.-]+", name) is not None
        if not inside or not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise DataError(f"its state.json names {name!r:.80}, which is no file of this folder")
    return [folder / name for name in names]


def _column_rows(batches: Iterator[Any]) -> Iterator[Row]:
    """Rows of record batches; what pyarrow finds wrong with the file is a fault of the file."""
    import pyarrow

    number = 0
    try:
        for batch in batches:
            for place in range(batch.num_rows):
                number += 1
                yield _column_row(number, batch, place)
    except (pyarrow.ArrowException, OSError) as error:
        after = f" after row {number}" if number else ""
        raise DataError(f"it cannot be read{after}: {_one_line(error)}") from error


def _column_row(number: int, batch: Any, place: int) -> Row:
    try:
        row = {name: batch.column(name)[place].as_py() for name in batch.schema.names}
    except UnicodeDecodeError:
        return number, Unfit("a byte is not UTF-8")
    return _checked(number, row)


def _wanted_columns(schema: Any) -> list[str]:
    """The columns to read.

    Raises:
        DataError: neither is there, one is there twice, or one is of a type that cannot hold it.
    """
    fits: dict[str, tuple[Callable[[Any], bool], str]] = {
        "prompt": (_is_text, "text"),
        "messages": (_is_messages, "a list of role and content"),
    }
    wanted = [name for name in schema.names if name in fits]
    if not wanted:
        shown = ", ".join(repr(name[:40]) for name in schema.names[:8]) or "nothing"
        raise DataError(f"there is no column 'prompt' or 'messages', there is {shown}")
    for name in wanted:
        if wanted.count(name) > 1:
            raise DataError(f"the column {name!r} is there twice; give each column a name of its own")
        fit, expected = fits[name]
        if not fit(schema.field(name).type):
            raise DataError(f"the column {name!r} is of type {schema.field(name).type}, expected {expected}")
    return wanted


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    # A column of nothing but nulls: its rows are told one by one, or the other column holds them all.
    return bool(
        types.is_null(kind) or types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    )


def _is_messages(kind: Any) -> bool:
    from pyarrow import types

    if types.is_null(kind):
        return True
    return bool((types.is_list(kind) or types.is_large_list(kind)) and types.is_struct(kind.value_type))


def _one_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
