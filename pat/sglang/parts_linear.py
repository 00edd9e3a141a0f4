"""A fused linear layer computed part by part, from weights that lie apart in another seat's storage."""

from __future__ import annotations

import torch
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod


class PartsLinear(UnquantizedLinearMethod):
    """In place of a merged layer's one product [n, in] x [in, out]: one a part, into the columns of the same result.

    ``parts``: weights [rows, in] of each part, views of the first seat's. Costs a kernel a part instead of a copy.
    """

    def __init__(self, parts: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.parts = parts
        self.columns = sum(len(part) for part in parts)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        result = rows.new_empty(len(rows), self.columns)
        at = 0
        for part in self.parts:
            torch.mm(rows, part.t(), out=result[:, at : at + len(part)])
            at += len(part)
        if bias is not None:
            result += bias
        return result.view(*x.shape[:-1], self.columns)
