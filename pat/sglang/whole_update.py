"""Weight updates of an engine that never switches: answered when every rank of a replica is done.

On by ``PAT_WHOLE_UPDATE``, which such an :class:`pat.sglang.engine.AdaptiveEngine` sets. SGLang answers when the leader
is done; the others may still read the file that the caller then deletes, and would go on with old weights, or die.
"""

from __future__ import annotations

import torch.distributed as dist

VARIABLE = "PAT_WHOLE_UPDATE"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATES = tuple(f"{UPDATER}.update_weights_from_{source}" for source in ("disk", "tensor", "distributed"))
"""SGLang's methods that take new weights, in every rank."""


def answer_of_all(output, told: list[tuple[bool, str]]) -> None:
    """Make ``output`` the first failure among the (success, message) of all ranks, if there is one."""
    failure = next((message for success, message in told if not success), None)
    if failure is not None:
        output.success, output.message = False, failure


def after_all(original, updater, request):
    """Around an update: answered with all ranks' answers."""
    from sglang.srt.distributed import get_tp_group

    output, group = original(updater, request), get_tp_group()
    told = [None] * group.world_size
    dist.all_gather_object(told, (output.success, output.message), group=group.cpu_group)
    answer_of_all(output, told)
    return output


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for update in UPDATES:
        HookRegistry.register(update, after_all, HookType.AROUND)
