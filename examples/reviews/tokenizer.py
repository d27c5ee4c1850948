"""The example's tokenizers: byte-level BPE, with pad, bos and eos tokens of their own."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from examples.reviews.settings import TokenizerSettings

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2


def train_tokenizer(texts: Iterable[str], settings: TokenizerSettings, folder: Path) -> None:
    """Train on `texts` and save. Encoding puts one bos in front, so a prompt opens as a pre-training text does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        min_frequency=settings.min_frequency,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    save_fast(tokenizer, folder)


def save_reading_copy(policy_tokenizer: Path, folder: Path) -> None:
    """The reward model's own copy, which closes every text with eos: the score is read there, however the text ends."""
    tokenizer = Tokenizer.from_file(str(policy_tokenizer / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}", special_tokens=[(BOS, BOS_ID), (EOS, EOS_ID)]
    )
    save_fast(tokenizer, folder)


def save_fast(tokenizer: Tokenizer, folder: Path) -> None:
    """Save in Hugging Face form."""
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="right",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def encode(folder: Path, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, with exactly the special tokens the tokenizer in `folder` adds by itself."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [encoding.ids for encoding in tokenizer.encode_batch(texts)]
