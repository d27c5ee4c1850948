"""The training loop that the example's policy and reward model share. Plain supervised learning; PPO is elsewhere.

Batches of like length, one-cycle learning rate, and a state saved after each epoch, so that a killed preparation goes
on where it was.
"""

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

STATE_FILE = "training_state.pt"


class Example(NamedTuple):
    """One text as token ids; the target is used by regression only."""

    token_ids: list[int]
    target: float = 0.0


class Batch(NamedTuple):
    """Right-padded rows. Causal attention never looks right, so no attention mask is needed."""

    input_ids: Tensor  # [B, L]
    lengths: Tensor  # [B]
    targets: Tensor  # [B] float32


def length_batches(examples: Sequence[Example], tokens_per_batch: int, pad_id: int, seed: int) -> list[Batch]:
    """Batches of neighbours in length, in a seeded order; each example once."""
    rng = random.Random(seed)
    order = sorted(range(len(examples)), key=lambda i: (len(examples[i].token_ids), rng.random()))
    groups: list[list[int]] = []
    for index in order:
        longest = len(examples[index].token_ids)
        if not groups or (len(groups[-1]) + 1) * longest > tokens_per_batch:
            groups.append([])
        groups[-1].append(index)
    rng.shuffle(groups)
    return [collate([examples[i] for i in group], pad_id) for group in groups]


def collate(examples: Sequence[Example], pad_id: int) -> Batch:
    """Pad on the right to the longest row."""
    longest = max(len(example.token_ids) for example in examples)
    rows = [example.token_ids + [pad_id] * (longest - len(example.token_ids)) for example in examples]
    return Batch(
        torch.tensor(rows),
        torch.tensor([len(example.token_ids) for example in examples]),
        torch.tensor([example.target for example in examples], dtype=torch.float32),
    )


def one_cycle(done: float, peak_lr: float) -> float:
    """Learning rate after a share `done` of the training: linear up over the first 10 %, then a cosine to 2 %."""
    if done < 0.1:
        return peak_lr * (0.05 + 0.95 * done / 0.1)
    return peak_lr * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (done - 0.1) / 0.9)))


def train_epochs(
    model: nn.Module,
    epochs: Sequence[Callable[[], list[Batch]]],
    loss_of: Callable[[Batch], Tensor],
    *,
    peak_lr: float,
    weight_decay: float,
    folder: Path,
    on_epoch: Callable[[int], None],
    on_batch: Callable[[int, int, float], None],
) -> None:
    """Train `model` in place.

    Args:
        epochs: one function for each epoch, which makes the epoch's batches.
        loss_of: mean loss of a batch.
        folder: where the state is kept between epochs; a state found there is continued, with the same result.
        on_epoch: told the number of finished epochs.
        on_batch: told the number of finished epochs, examples in this batch, and its loss.
    """
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=peak_lr,
        betas=(0.9, 0.98),
        fused=True,
    )
    first = 0
    state_path = folder / STATE_FILE
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epochs_done"]
    on_epoch(first)
    model.train()
    for number in range(first, len(epochs)):
        batches = epochs[number]()
        for index, batch in enumerate(batches):
            rate = one_cycle((number + index / len(batches)) / len(epochs), peak_lr)
            for group in optimizer.param_groups:
                group["lr"] = rate
            loss = loss_of(batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            on_batch(number, len(batch.lengths), loss.item())
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs_done": number + 1}
        aside = state_path.with_suffix(".aside")
        torch.save(state, aside)
        aside.replace(state_path)
        on_epoch(number + 1)
    state_path.unlink(missing_ok=True)
    model.eval()
