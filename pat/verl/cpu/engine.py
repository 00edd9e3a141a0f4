"""VeRL's FSDP2 engine on CPU ranks."""

from __future__ import annotations

from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
class CpuFSDP2Engine(FSDPEngineWithLMHead):
    """VeRL offloads a forward-only model (the reference) to pinned memory, which needs an accelerator to pin for."""

    def _build_fsdp_module(self, module):
        forward_only = self.engine_config.forward_only
        object.__setattr__(self.engine_config, "forward_only", False)  # the configuration is frozen
        try:
            return super()._build_fsdp_module(module)
        finally:
            object.__setattr__(self.engine_config, "forward_only", forward_only)
