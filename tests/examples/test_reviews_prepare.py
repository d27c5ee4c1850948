"""The reviews example's preparation on a tiny made-up corpus: no network, seconds."""

import hashlib
import io
import json
import random
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from examples.reviews import download, policy, prepare, reward_model, training
from examples.reviews.corpus import Corpus, CorpusError, Review, make_prompts, parse_rated
from examples.reviews.judge import vader_mean_sentence
from examples.reviews.reward_model import cut, spoil
from examples.reviews.settings import (
    CorpusSettings,
    ModelShape,
    PolicySettings,
    PromptSettings,
    RewardSettings,
    Settings,
    SourceSettings,
    TokenizerSettings,
)

SUBJECTS = ["film", "plot", "cast", "story", "ending", "script", "score", "camera", "hero", "pace"]
VERDICTS = [("is a warm joy to watch", 2.5), ("is dull and far too long", -2.0), ("is neither here nor there", 0.1)]


FAKE_SOURCE = SourceSettings(package="fake", version="1", archive="extra/texts.tar.gz", others=("tweets.txt",))


def rated_rows(count: int) -> str:
    """Rows in the shape of the real files."""
    rng = random.Random(0)
    rows = []
    for number in range(count):
        verdict, rating = VERDICTS[number % 3]
        names = rng.sample(SUBJECTS, 3)
        rows.append(f"{number}\t{rating}\tThe {' and '.join(names)} in number {number} {verdict}.")
    return "\r\n".join(rows)


def fake_source(folder: Path) -> SourceSettings:
    """A source distribution with a tar.gz of rated texts inside, and the settings that expect it."""
    source = FAKE_SOURCE
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz") as archive:
        for name, count in ((source.reviews, 90), ("tweets.txt", 20)):
            content = rated_rows(count).replace("The ", "A " if count == 20 else "The ").encode("utf-8-sig")
            member = tarfile.TarInfo(f"texts/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    folder.mkdir(parents=True)
    path = folder / "fake-1.tar.gz"
    with tarfile.open(path, mode="w:gz") as archive:
        member = tarfile.TarInfo(f"fake-1/{source.archive}")
        member.size = len(inner.getvalue())
        archive.addfile(member, io.BytesIO(inner.getvalue()))
    return replace(source, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def known_source(prepared: Path) -> SourceSettings:
    """The source settings of the `prepared` fixture, whose archive's hash differs from another one's."""
    content = (prepared / "cache/download/fake-1.tar.gz").read_bytes()
    return replace(FAKE_SOURCE, sha256=hashlib.sha256(content).hexdigest())


def tiny_settings(cache: Path) -> Settings:
    """Everything small enough for a second or two."""
    shape = ModelShape(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1, max_positions=64)
    return Settings(
        source=fake_source(cache / "download"),
        corpus=CorpusSettings(num_held_out=20),
        tokenizer=TokenizerSettings(vocab_size=300),
        policy=PolicySettings(shape=shape, epochs_all=1, epochs_reviews=1, tokens_per_batch=512),
        reward_model=RewardSettings(epochs=2, tokens_per_batch=512),
        prompts=PromptSettings(num_train=40, num_held_out=10),
    )


@pytest.fixture
def quiet() -> Console:
    return Console(file=io.StringIO())


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slower on more threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished preparation; tests may copy from it, not write to it."""
    folder = tmp_path_factory.mktemp("prepared")
    prepare.prepare(folder / "out", folder / "cache", Console(file=io.StringIO()), tiny_settings(folder / "cache"))
    return folder


def test_prepared_folder_loads_in_hugging_face_form(prepared: Path) -> None:
    policy = AutoModelForCausalLM.from_pretrained(prepared / "out/policy")
    tokenizer = AutoTokenizer.from_pretrained(prepared / "out/policy")
    reader = AutoTokenizer.from_pretrained(prepared / "out/reward_model")
    reward_model = AutoModelForSequenceClassification.from_pretrained(prepared / "out/reward_model")
    special = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id]
    assert len(set(special)) == 3
    assert special == [getattr(policy.config, f"{name}_token_id") for name in ("pad", "bos", "eos")]
    assert tokenizer("The film")["input_ids"].count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(tokenizer("The film is")["input_ids"], skip_special_tokens=True) == "The film is"
    assert policy.lm_head.weight is policy.model.embed_tokens.weight
    assert reader("The film")["input_ids"][-1] == reader.eos_token_id
    logits = reward_model(**reader(["The film is dull.", "The cast"], padding=True, return_tensors="pt")).logits
    alone = reward_model(**reader(["The cast"], return_tensors="pt")).logits
    assert logits.shape == (2, 1)
    torch.testing.assert_close(logits[1], alone[0], rtol=0, atol=1e-5)


def test_second_call_builds_nothing_and_a_changed_setting_only_what_depends_on_it(
    prepared: Path, tmp_path: Path, quiet: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(prepared / "cache", cache)
    settings = replace(tiny_settings(tmp_path / "again"), source=known_source(prepared))
    built: list[str] = []
    real = prepare.run_stage

    def counting(stage, cache, wait):  # type: ignore[no-untyped-def]
        if not stage.folder(cache).exists():
            built.append(stage.name)
        real(stage, cache, wait)

    monkeypatch.setattr(prepare, "run_stage", counting)
    prepare.prepare(tmp_path / "out", cache, quiet, settings)
    assert built == []
    assert (tmp_path / "out/policy/model.safetensors").exists()
    changed = replace(settings, reward_model=replace(settings.reward_model, seed=99))
    prepare.prepare(tmp_path / "out", cache, quiet, changed)
    assert built == ["reward_model"]
    (tmp_path / "out/train.jsonl").unlink()
    prepare.prepare(tmp_path / "out", cache, quiet, changed)
    assert built == ["reward_model"]
    assert (tmp_path / "out/train.jsonl").exists(), "a lost file is put back from the cache"


def test_a_killed_training_goes_on_and_ends_bit_equal(
    tmp_path: Path, quiet: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    prepare.prepare(tmp_path / "a", straight, quiet, tiny_settings(straight))
    settings = tiny_settings(killed)
    real = training.length_batches
    epochs_begun = []

    def dies_in_second_epoch(*arguments):  # type: ignore[no-untyped-def]
        epochs_begun.append(arguments[-1])
        if len(epochs_begun) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    for module in (policy, reward_model):
        monkeypatch.setattr(module, "length_batches", dies_in_second_epoch)
    with pytest.raises(KeyboardInterrupt):
        prepare.prepare(tmp_path / "b", killed, quiet, settings)
    assert not (tmp_path / "b").exists()
    prepare.prepare(tmp_path / "b", killed, quiet, settings)
    assert epochs_begun[1] == epochs_begun[2]
    for name in ("policy", "reward_model"):
        weights = f"{name}/model.safetensors"
        assert (tmp_path / "a" / weights).read_bytes() == (tmp_path / "b" / weights).read_bytes()
        assert not (tmp_path / "b" / name / training.STATE_FILE).exists()


def test_a_file_with_another_hash_is_refused(tmp_path: Path, quiet: Console) -> None:
    settings = tiny_settings(tmp_path / "cache")
    with (tmp_path / "cache/download/fake-1.tar.gz").open("ab") as file:
        file.write(b"x")
    with pytest.raises(download.DownloadError, match=r"SHA-256.*delete it"):
        prepare.prepare(tmp_path / "out", tmp_path / "cache", quiet, settings)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", "SHA-256 differs"),
        ("ERROR: No matching distribution found for fake==1", "check the network"),
        ("/usr/bin/python: No module named pip", "ensurepip"),
    ],
)
def test_a_failing_pip_is_told_in_one_line_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, said: str
) -> None:
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr=output)
    monkeypatch.setattr(download.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(download.DownloadError, match=said) as caught:
        download.fetch_source(SourceSettings(package="fake", version="1"), tmp_path / "download")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "download").iterdir()) == []


def test_preparing_needs_no_torch_before_a_stage_does() -> None:
    program = "import sys, examples.reviews.prepare; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=False).returncode == 0


def test_held_out_prompts_open_no_training_review() -> None:
    shared = [Review(f"The film is a {n} thing of its own kind", 0.0) for n in range(5)]
    train = [Review(f"Some words number{n} and more and more of them", 0.0) for n in range(30)]
    held_out = [Review(f"Other words number{n} and more and more of them", 0.0) for n in range(8)]
    settings = PromptSettings(num_train=30, num_held_out=9)
    train_prompts, held_out_prompts = make_prompts(Corpus([*train, *shared], [*shared[:2], *held_out], []), settings)
    assert "The film is a" in held_out_prompts
    assert not set(train_prompts) & set(held_out_prompts)
    assert len(set(train_prompts)) == 30
    assert len(set(held_out_prompts)) == 9
    with pytest.raises(CorpusError, match="wanted 32"):
        make_prompts(Corpus([*train, *shared], held_out, []), replace(settings, num_train=32, num_held_out=8))


def test_rated_rows_are_cleaned_and_a_torn_one_is_named() -> None:
    assert parse_rated("1\t0.5\tTom &amp; Jerry   run\r\n") == [Review("Tom & Jerry run", 0.5)]
    with pytest.raises(CorpusError, match="row 2"):
        parse_rated("1\t0.5\tfine\n2\tno tab more")


def test_spoilt_texts_keep_to_the_words_of_the_review() -> None:
    rng = random.Random(3)
    text = "a warm and funny film that never once loses its way"
    assert sorted(spoil(text, rng, "shuffled").split()) == sorted(text.split())
    for _ in range(20):
        repeated = spoil(text, rng, "repeated").split()
        assert len(repeated) > len(text.split())
        assert set(repeated) == set(text.split())


def test_a_cut_review_is_an_opening_of_it_and_knows_what_is_missing() -> None:
    rng = random.Random(3)
    text = "a warm, and funny film that never once loses its way"
    for _ in range(50):
        opening, missing = cut(text, rng)
        assert text.startswith(opening.removesuffix("."))
        assert missing == pytest.approx(1 - len(opening.split()) / len(text.split()))
    assert cut("Too long", rng) == ("Too long", 0.0)


def test_length_batches_hold_each_example_once_and_keep_to_the_budget() -> None:
    examples = [training.Example([3] * (1 + n % 13), float(n)) for n in range(57)]
    batches = training.length_batches(examples, 40, pad_id=0, seed=1)
    assert sorted(t for b in batches for t in b.targets.tolist()) == [float(n) for n in range(57)]
    assert all(b.input_ids.numel() <= 40 for b in batches)


def test_the_same_sentence_twice_judges_the_same() -> None:
    once = "This is a wonderful, moving film."
    assert vader_mean_sentence(once) > 0.5
    assert vader_mean_sentence(f"{once} {once}") == pytest.approx(vader_mean_sentence(once))
    assert vader_mean_sentence(f'"{once}" {once}\n{once}') == pytest.approx(vader_mean_sentence(once), abs=1e-9)


@pytest.mark.parametrize("text", ["", "   ", "...", "\n\n", "?! ?!"])
def test_a_text_without_words_judges_neutral(text: str) -> None:
    assert vader_mean_sentence(text) == 0.0


def test_the_judge_tells_praise_from_blame() -> None:
    assert vader_mean_sentence("Great fun.") > 0 > vader_mean_sentence("A terrible bore.")


def test_published_prompts_are_jsonl_with_a_prompt_each(prepared: Path) -> None:
    for name, count in (("train", 40), ("held_out", 10)):
        rows = [json.loads(line) for line in (prepared / f"out/{name}.jsonl").read_text().splitlines()]
        assert len(rows) == count
        assert all(set(row) == {"prompt"} and len(row["prompt"].split()) == 4 for row in rows)


def test_the_manifest_tells_the_figures(prepared: Path) -> None:
    figures = json.loads((prepared / "out/prepared.json").read_text())["figures"]
    assert figures["reviews"] == 70
    assert {"held_out_loss", "correlation"} <= figures.keys()
