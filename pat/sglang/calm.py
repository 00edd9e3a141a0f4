"""A data-parallel controller that waits for messages instead of spinning, in engines that never switch.

On by ``PAT_CALM``. SGLang's own looks for messages without a pause: on a machine with few cores it takes one from the
replicas. An engine that switches has :mod:`pat.sglang.router` in its place, which waits, too: arms differ in their
layouts alone.
"""

from __future__ import annotations

import os

from pat.sglang.settings import VARIABLE

WAIT_MS = 500


def event_loop(_original, controller) -> None:
    """In place of DataParallelController.event_loop."""
    import zmq
    from sglang.srt.managers.io_struct import sock_recv

    messages = controller.recv_from_tokenizer
    while True:
        controller.soft_watchdog.feed()
        if messages.poll(WAIT_MS, zmq.POLLIN):
            controller._request_dispatcher(sock_recv(messages))


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not os.environ.get(VARIABLE):
        target = "sglang.srt.managers.data_parallel_controller.DataParallelController.event_loop"
        HookRegistry.register(target, event_loop, HookType.AROUND)
