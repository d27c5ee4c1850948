"""From the rated texts to a corpus and to prompts. Knows files and words, no tokens and no models."""

import html
import json
import random
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from examples.reviews.settings import CorpusSettings, PromptSettings, SourceSettings


@dataclass(frozen=True)
class Review:
    """One film-review sentence and the mean of its human ratings, from -4 (worst) to 4 (best)."""

    text: str
    rating: float


@dataclass(frozen=True)
class Corpus:
    """What is trained on, and the reviews kept apart from all training."""

    train: list[Review]
    held_out: list[Review]
    others: list[str]


class CorpusError(ValueError):
    """The rated texts do not look as expected."""


def read_source(source_archive: Path, source: SourceSettings) -> dict[str, str]:
    """The text files of `source`, by name, out of the archive that lies inside the source distribution."""
    found: dict[str, str] = {}
    with tarfile.open(source_archive) as outer:
        inner_name = next((m.name for m in outer.getmembers() if m.name.endswith(source.archive)), None)
        if inner_name is None:
            raise CorpusError(f"{source_archive.name} holds no {source.archive}")
        with tarfile.open(fileobj=outer.extractfile(inner_name)) as inner:
            for member in inner.getmembers():
                name = Path(member.name).name
                if name == source.reviews or name in source.others:
                    found[name] = inner.extractfile(member).read().decode("utf-8-sig")
    missing = {source.reviews, *source.others} - found.keys()
    if missing:
        raise CorpusError(f"{source.archive} lacks {', '.join(sorted(missing))}")
    return found


def parse_rated(content: str) -> list[Review]:
    """Rows of `id <tab> mean rating <tab> text`; white space is collapsed and HTML entities are resolved."""
    reviews = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        fields = line.split("\t", 2)
        if len(fields) != 3:
            raise CorpusError(f"row {number}: expected id, rating and text, found {len(fields)} fields")
        text = " ".join(html.unescape(fields[2]).split())
        if text:
            reviews.append(Review(text, float(fields[1])))
    return reviews


def build_corpus(files: dict[str, str], source: SourceSettings, settings: CorpusSettings) -> Corpus:
    """Drop doubles and very long rows, then keep `num_held_out` reviews apart by a seeded draw."""
    seen: set[str] = set()

    def fresh(reviews: Iterable[Review]) -> list[Review]:
        kept = []
        for review in reviews:
            folded = review.text.casefold()
            if folded not in seen and len(review.text.split()) <= settings.max_words:
                seen.add(folded)
                kept.append(review)
        return kept

    reviews = fresh(parse_rated(files[source.reviews]))
    others = [review.text for name in source.others for review in fresh(parse_rated(files[name]))]
    if len(reviews) <= settings.num_held_out:
        raise CorpusError(f"{len(reviews)} reviews are too few to keep {settings.num_held_out} apart")
    random.Random(settings.seed).shuffle(reviews)
    return Corpus(train=reviews[settings.num_held_out :], held_out=reviews[: settings.num_held_out], others=others)


def write_corpus(corpus: Corpus, folder: Path) -> None:
    """Three JSONL files: train and held_out with ratings, others without."""
    for name, reviews in (("train", corpus.train), ("held_out", corpus.held_out)):
        write_jsonl(folder / f"{name}.jsonl", ({"text": r.text, "rating": r.rating} for r in reviews))
    write_jsonl(folder / "others.jsonl", ({"text": text} for text in corpus.others))


def read_corpus(folder: Path) -> Corpus:
    """What `write_corpus` wrote."""
    train, held_out = ([Review(**row) for row in read_jsonl(folder / f"{n}.jsonl")] for n in ("train", "held_out"))
    return Corpus(train, held_out, [row["text"] for row in read_jsonl(folder / "others.jsonl")])


def make_prompts(corpus: Corpus, settings: PromptSettings) -> tuple[list[str], list[str]]:
    """Opening words of reviews, for training and held out; no prompt stands twice, or in both.

    Held-out prompts open held-out reviews only, training prompts open the others, and an opening that both kinds
    share ("The film is a") goes to the held-out side.
    """

    def openings(reviews: list[Review]) -> list[str]:
        rows = (review.text.split() for review in reviews)
        return [" ".join(words[: settings.num_words]) for words in rows if len(words) >= settings.min_review_words]

    held_out = list(dict.fromkeys(openings(corpus.held_out)))[: settings.num_held_out]
    taken = {prompt.casefold() for prompt in held_out}
    train = [p for p in dict.fromkeys(openings(corpus.train)) if p.casefold() not in taken]
    random.Random(settings.seed).shuffle(train)
    train = train[: settings.num_train]
    if len(held_out) < settings.num_held_out or len(train) < settings.num_train:
        raise CorpusError(
            f"found {len(train)} training and {len(held_out)} held-out prompts, "
            f"wanted {settings.num_train} and {settings.num_held_out}"
        )
    return train, held_out


def write_jsonl(path: Path, rows: Iterable[dict]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def read_jsonl(path: Path) -> list[dict]:
    """All rows of a JSONL file. Split at newlines only: a text may hold other line separators."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
