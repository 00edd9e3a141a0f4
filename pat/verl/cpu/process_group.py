"""VeRL asks torch for backends ``cpu:gloo,DEVICE:...``; on the CPU that names one device twice, which torch refuses.

No setting changes that string, so the function is wrapped, before VeRL's workers import it by name.
"""

from __future__ import annotations

import functools

import verl.utils.distributed as distributed

original = distributed.initialize_global_process_group_ray


@functools.wraps(original)
def initialize_global_process_group_ray(timeout_second=None, backend=None):
    return original(timeout_second=timeout_second, backend=backend or "cpu:gloo")


distributed.initialize_global_process_group_ray = initialize_global_process_group_ray
