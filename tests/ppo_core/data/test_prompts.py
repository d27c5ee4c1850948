"""Prompt sources: one begin-of-text, a seeded order that wraps, bad rows by number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppo_core.data.prompts import PromptSource
from ppo_core.data.tokens import text_ids
from ppo_core.errors import DataError
from tests.ppo_core.tiny_models import tiny_tokenizer


def file(folder: Path, texts: list[str]) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def source(folder: Path, texts: list[str], limit: int = 64, seed: int = 1, **more: int) -> PromptSource:
    return PromptSource(file(folder, texts), tiny_tokenizer(), limit, seed, **more)


TEN = [f"film {number}" for number in range(10)]


def test_exactly_one_begin_and_no_end() -> None:
    """T15: huggingface/trl#3853, the template writes one and the tokenizer adds another."""
    tokenizer = tiny_tokenizer()
    plain, rendered = text_ids(tokenizer, ["the film", "<s>the film"])
    assert plain == rendered
    assert plain[0] == 1
    assert plain.count(1) == 1
    assert 2 not in plain
    assert tokenizer.decode(plain[1:]) == "the film"


def test_a_tokenizer_without_a_begin_adds_none() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = None
    assert text_ids(tokenizer, ["film"]) == [tokenizer("film", add_special_tokens=False)["input_ids"]]


def test_what_looks_like_a_control_token_is_text() -> None:
    tokenizer = tiny_tokenizer()
    (ids,) = text_ids(tokenizer, ["good</s> film<pad>"])
    assert not {0, 2} & set(ids)
    assert tokenizer.decode(ids[1:]) == "good</s> film<pad>"


def test_an_epoch_has_every_prompt_once_and_the_next_another_order(tmp_path: Path) -> None:
    """T22: stopped and resumed, the same prompts come as without a stop."""
    prompts = source(tmp_path, TEN)
    epochs = [prompts.take(10 * epoch, 10).indices for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = source(tmp_path, TEN)
    assert [again.take(cursor, 2).indices for cursor in range(4, 20, 2)] == [
        (epochs[0] + epochs[1])[cursor : cursor + 2] for cursor in range(4, 20, 2)
    ]


def test_a_batch_may_run_over_the_end_of_an_epoch(tmp_path: Path) -> None:
    """T12: 9 prompts and batches of 8: the ninth is used."""
    prompts = source(tmp_path, TEN[:9])
    used = prompts.take(0, 8).indices + prompts.take(8, 8).indices
    assert sorted(used[:9]) == list(range(9))
    assert len(set(used[9:])) == 7


def test_the_seed_decides_the_order(tmp_path: Path) -> None:
    assert source(tmp_path, TEN, seed=1).take(0, 10).indices != source(tmp_path, TEN, seed=2).take(0, 10).indices


def test_a_batch_holds_ids_texts_and_numbers_of_the_same_prompts(tmp_path: Path) -> None:
    batch = source(tmp_path, TEN).take(3, 4)
    assert [TEN[index] for index in batch.indices] == batch.texts
    assert batch.prompt_ids == text_ids(tiny_tokenizer(), batch.texts)


def test_too_long_prompts_are_dropped_and_counted(tmp_path: Path) -> None:
    """T13: huggingface/trl#3569. The limit counts the begin-of-text; 5 and 16 tokens are untouched."""
    texts = ["x" * 4, "x" * 15, "x" * 16, "x" * 3999]
    prompts = source(tmp_path, texts, limit=16)
    assert len(prompts) == 2
    assert prompts.num_too_long == 2
    assert sorted(map(len, prompts.take(0, 2).prompt_ids)) == [5, 16]
    assert sorted(prompts.take(0, 2).indices) == [0, 1]


def test_a_cut_prompt_keeps_its_end_and_its_text_is_what_is_left(tmp_path: Path) -> None:
    path = file(tmp_path, ["x" * 15, "abc" + "x" * 14 + "z"])
    prompts = PromptSource(path, tiny_tokenizer(), 16, 1, too_long="cut")
    assert (len(prompts), prompts.num_too_long, prompts.num_filtered(2)) == (2, 1, 0)
    whole, kept = prompts.first(2).prompt_ids
    assert kept == [1, *text_ids(tiny_tokenizer(), ["x" * 14 + "z"])[0][1:]]
    assert whole == text_ids(tiny_tokenizer(), ["x" * 15])[0]
    assert prompts.first(2).texts == ["x" * 15, "x" * 14 + "z"]


def test_used_and_filtered_are_what_was_consumed(tmp_path: Path) -> None:
    texts = ["x" * (4 if number % 3 else 40) for number in range(12)]
    prompts = source(tmp_path, texts, limit=16)
    filtered = [prompts.num_filtered(cursor) for cursor in range(25)]
    assert filtered[0] == 0
    assert filtered[8] == 4
    assert filtered[16] == 8
    assert filtered == sorted(filtered)
    assert filtered[4] > 0


def test_the_first_prompts_are_the_files(tmp_path: Path) -> None:
    prompts = source(tmp_path, ["x" * 40, *TEN], limit=16)
    assert prompts.first(3).texts == TEN[:3]
    assert len(prompts.first(99).texts) == 10


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (b'{"prompt": "\xff"}', "row 2: byte 12 is not UTF-8"),
        (b'{"prompt": "ok\\ud800bad"}', "row 2: the prompt holds half of a surrogate pair"),
        (b'{"prompt": ""}', "row 2: the prompt is empty"),
        (b'{"prompt": "  "}', "row 2: the prompt is empty"),
        (b'{"prompt": "' + b"x" * 5_000_000 + b'"}', "row 2: the prompt has 5000000 characters"),
        (b'{"prompt": 3}', "row 2: expected an object"),
        (b"{", "row 2: not valid JSON"),
        (b"[" * 100_000, "row 2: not valid JSON"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: bytes, problem: str) -> None:
    """T41, half of it: the row, its number and its file are in the message."""
    path = tmp_path / "bad.jsonl"
    path.write_bytes('{"prompt": "مرحبا 🎬"}\n'.encode() + row + b"\n")
    with pytest.raises(DataError, match=problem) as caught:
        PromptSource(path, tiny_tokenizer(), 64, 1)
    assert str(path) in str(caught.value)


def test_emoji_and_right_to_left_text_are_untouched(tmp_path: Path) -> None:
    prompts = source(tmp_path, ["مرحبا 🎬"])
    batch = prompts.take(0, 1)
    assert batch.texts == ["مرحبا 🎬"]
    assert tiny_tokenizer().decode(batch.prompt_ids[0], skip_special_tokens=True) == "مرحبا 🎬"


def test_too_few_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="3 of 3 prompts have at most 64 tokens, 8 are needed"):
        source(tmp_path, TEN[:3], min_prompts=8)
    with pytest.raises(DataError, match="0 of 0 prompts"):
        source(tmp_path, [])


def test_a_missing_file_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        PromptSource(tmp_path / "nothing.jsonl", tiny_tokenizer(), 64, 1)
