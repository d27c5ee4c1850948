"""Digests of weights: whether two sets of tensors are the same, told by a short text."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def weights_digest(module: nn.Module) -> str:
    """SHA-256 over name, type, shape and bytes of every parameter, in the order of their names.

    Tied weights count once. Any change of any bit, key or shape changes it.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        tensor = parameter.detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def same_storage(a: nn.Module, b: nn.Module) -> bool:
    """Whether both modules' parameters are the same memory under the same names, so that one digest tells of both."""
    first, second = dict(a.named_parameters()), dict(b.named_parameters())
    return first.keys() == second.keys() and all(
        tensor.data_ptr() == second[name].data_ptr() and tensor.shape == second[name].shape
        for name, tensor in first.items()
    )
