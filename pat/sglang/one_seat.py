"""Where memory allows one seat only: weights and CUDA graphs are those of the seat in use; a switch hands them over."""

from __future__ import annotations

from typing import Any

from torch import nn

from pat.layout import Layout
from pat.sglang.staging import SharedStaging
from pat.sglang.weight_move import WeightMove, WeightsMoved, shards_of
from pat.sglang.world import World


class OneSeat:
    """Of one scheduler process. ``layout`` and ``model``: which seat holds the weights now."""

    def __init__(self, world: World, staging: SharedStaging | None, layout: Layout, model: nn.Module) -> None:
        self.world, self.staging, self.layout, self.model = world, staging, layout, model
        self.graphed: dict[int, tuple[bool, bool]] = {}

    def hand_weights(self, layout: Layout, model: nn.Module) -> WeightsMoved:
        """Hand the weights to ``model``, built for ``layout``; of all ranks at once."""
        if model is self.model:
            return WeightsMoved()
        moved = WeightMove(self.world, self.layout, layout, self.staging).run(shards_of(self.model, model))
        self.layout, self.model = layout, model
        return moved

    def drop_graphs(self, runner: Any) -> None:
        """Free the CUDA graphs of a ModelRunner whose weights leave; it remembers which kinds it had."""
        graphs = runner.decode_cuda_graph_runner, runner.prefill_cuda_graph_runner
        eager = runner.eager_runner
        self.graphed.setdefault(id(runner), tuple(not isinstance(g, type(None) | type(eager)) for g in graphs))
        runner.decode_cuda_graph_runner = runner.prefill_cuda_graph_runner = eager

    def capture_graphs(self, runner: Any) -> None:
        """Capture the graphs that a ModelRunner had, in its context, now that its weights lie elsewhere.

        With KV cache moved already: capturing writes to the spare slot of the layout's division.
        """
        decode, prefill = self.graphed[id(runner)]
        if decode:
            runner.init_decode_cuda_graph()
        if prefill:
            runner.init_prefill_cuda_graph()
