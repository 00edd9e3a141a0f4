"""Weights of a seat as views of the first seat's storage.

Slices of a fused tensor that do not adjoin are copied, or, where copies would take too much memory, merged layers
(gate and up) are computed part by part from views.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from pat.layout import Layout
from pat.reshard.weights import Copy, Part, slices


def sharding(module: nn.Module, name: str) -> tuple[int, tuple[Part, ...]] | None:
    """(sharded dimension, its fused parts) of parameter ``name`` of an SGLang layer; None where every rank has all."""
    from sglang.srt.layers import linear
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(module, linear.QKVParallelLinear):
        key, value = module.head_size, module.v_head_size
        heads, kv_heads = module.total_num_heads, module.total_num_kv_heads
        return 0, (Part(heads, key), Part(kv_heads, key), Part(kv_heads, value))
    if isinstance(module, linear.MergedColumnParallelLinear):
        return 0, tuple(Part(size) for size in module.output_sizes)
    if isinstance(module, VocabParallelEmbedding):
        return 0, (Part(module.num_embeddings_padded),)
    if isinstance(module, linear.ColumnParallelLinear):
        return 0, (Part(module.output_size),)
    if isinstance(module, linear.RowParallelLinear) and name == "weight":
        return 1, (Part(module.input_size),)
    return None


def parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """(path, module, name, parameter) of each parameter, shared ones once."""
    seen = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{path}.{name}", module, name, parameter


def pairs(one: nn.Module, other: nn.Module) -> Iterator[tuple]:
    """(path, layer of ``other``, name, sharding, parameter of ``one``, of ``other``) of the models of two seats, in one
    order on all ranks; the sharding is as in :func:`sharding`. ValueError names a parameter sharded differently.
    """
    for (path, old, name, source), (path2, new, _, target) in zip(parameters(one), parameters(other), strict=True):
        kind = sharding(old, name)
        if path != path2 or kind != sharding(new, name):
            raise ValueError(
                f"{path} is sharded as {kind} in one seat, but {path2} as {sharding(new, name)} in another"
            )
        yield path, new, name, kind, source, target


@dataclass(frozen=True, slots=True)
class FusedCopy:
    """A parameter that had to be copied: ``pieces`` of ``source`` along ``dim``."""

    target: torch.Tensor
    source: torch.Tensor
    dim: int
    pieces: tuple[Copy, ...]

    def refresh(self) -> None:
        for piece in self.pieces:
            part = self.source.narrow(self.dim, piece.start, piece.length)
            self.target.narrow(self.dim, piece.to, piece.length).copy_(part)


@dataclass(frozen=True, slots=True)
class SeatWeights:
    """What a seat's weights take: bytes that are the first seat's own, and bytes of copies."""

    shared_bytes: int
    copied_bytes: int
    copies: tuple[FusedCopy, ...] = ()

    def refresh(self) -> None:
        """Bring the copies up to date after the first seat's weights have changed."""
        with torch.no_grad():
            for copy in self.copies:
                copy.refresh()


@contextmanager
def unallocated() -> Iterator[None]:
    """Modules built in this block have empty parameters: memory of another seat will stand for theirs."""
    from torch.nn.modules.module import register_module_parameter_registration_hook

    def empty(_module, _name, parameter):
        if parameter is not None:
            parameter.data = parameter.data.new_empty(0)

    handle = register_module_parameter_registration_hook(empty)
    try:
        yield
    finally:
        handle.remove()


def size_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def copied_share(first: nn.Module, low: Layout, others: Iterable[Layout]) -> float:
    """What copies of all fused tensors in the seats of ``others`` would add, as a share of the first seat's weights."""
    total = fused = 0
    for _, module, name, parameter in parameters(first):
        kind = sharding(module, name)
        total += size_bytes(parameter)
        fused += size_bytes(parameter) if kind is not None and len(kind[1]) > 1 else 0
    return sum(low.tp / layout.tp for layout in others) * fused / total


@torch.no_grad()
def share(
    first: nn.Module, model: nn.Module, low: Layout, high: Layout, rank: int, copy_merged: bool = True
) -> SeatWeights:
    """Fill ``model``, built for ``high`` on world rank ``rank``, from ``first``, which holds the weights under ``low``.

    ``copy_merged``: copy merged layers rather than compute them part by part. ValueError names a parameter that the
    two layouts shard differently.
    """
    shared, copied, copies = 0, 0, []
    for _, new, name, kind, source, target in pairs(first, model):
        if kind is None:
            target.data = source.data
            shared += size_bytes(source)
            continue
        dim, parts = kind
        pieces = slices(parts, low, high, rank)
        merged = type(new).__name__ == "MergedColumnParallelLinear" and name == "weight"
        if len(pieces) > 1 and merged and not copy_merged:
            from pat.sglang.parts_linear import PartsLinear

            views = tuple(source.data.narrow(dim, piece.start, piece.length) for piece in pieces)
            new.quant_method = PartsLinear(views)
            target.data = source.data[:0]
            shared += sum(size_bytes(view) for view in views)
        elif len(pieces) == 1:
            target.data = source.data.narrow(dim, pieces[0].start, pieces[0].length)
            shared += size_bytes(target)
        else:
            shape = list(source.shape)
            shape[dim] = sum(piece.length for piece in pieces)
            target.data = source.data.new_empty(shape)
            copies.append(FusedCopy(target.data, source.data, dim, pieces))
            copied += size_bytes(target)
    weights = SeatWeights(shared, copied, tuple(copies))
    weights.refresh()
    return weights


def of_first(model: nn.Module) -> SeatWeights:
    """The first seat's weights: all its own, nothing to refresh."""
    return SeatWeights(0, sum(size_bytes(parameter) for *_, parameter in parameters(model)))
