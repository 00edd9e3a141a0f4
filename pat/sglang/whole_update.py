"""Weight updates of an engine that never switches: answered when every rank of a replica is done.

On by ``PAT_WHOLE_UPDATE``, which such an :class:`pat.sglang.engine.AdaptiveEngine` sets. SGLang answers when the leader
is done; the others may still read the file that the caller then deletes, and would go on with old weights, or die.
"""

from __future__ import annotations

import torch.distributed as dist

VARIABLE = "PAT_WHOLE_UPDATE"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def after_all(original, updater, request):
    """Around an update: the first failure of any rank is the answer of all."""
    from sglang.srt.distributed import get_tp_group

    output, group = original(updater, request), get_tp_group()
    told = [None] * group.world_size
    dist.all_gather_object(told, (output.success, output.message), group=group.cpu_group)
    output.success, output.message = next((one for one in told if not one[0]), told[0])
    return output


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for source in ("disk", "tensor", "distributed"):
        HookRegistry.register(f"{UPDATER}.update_weights_from_{source}", after_all, HookType.AROUND)
