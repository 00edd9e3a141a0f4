"""The data-parallel controller's part in a switch: hold all messages behind an order, then route them anew."""

from __future__ import annotations

from typing import Any

from pat.sglang.order import Order, Route
from pat.sglang.settings import Settings


class Router:
    """Of the controller process, which all messages to the schedulers pass through, in order."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.held: list[Any] | None = None

    def event_loop(self, original, controller) -> None:
        """In place of DataParallelController.event_loop, which spins; this one sleeps until a message comes."""
        import zmq
        from sglang.srt.managers.io_struct import sock_recv

        orders = controller.context.socket(zmq.PULL)
        orders.bind(self.settings.orders)
        messages = controller.recv_from_tokenizer
        poller = zmq.Poller()
        poller.register(orders, zmq.POLLIN)
        poller.register(messages, zmq.POLLIN)
        while True:
            controller.soft_watchdog.feed()
            ready = dict(poller.poll(500))
            if messages in ready:
                self.take(controller, sock_recv(messages))
            if orders in ready:
                self.obey(controller, orders.recv_pyobj())

    def take(self, controller, message: Any) -> None:
        """Pass a message on, or hold it while a switch is under way."""
        if self.held is not None:
            self.held.append(message)
            return
        if getattr(message, "routed_dp_rank", None) is not None:
            message.routed_dp_rank %= sum(controller.status)
        controller._request_dispatcher(message)

    def obey(self, controller, command: Order | Route) -> None:
        """An order goes to all leaders as the last message before the switch; a route ends the switch."""
        from sglang.srt.managers.io_struct import SetInternalStateReq

        if isinstance(command, Order):
            controller.send_control_message(SetInternalStateReq(server_args=command.encode()))
            self.held = []
            return
        controller.status = [replica < command.replicas for replica in range(controller.max_dp_size)]
        controller._refresh_active_workers()
        held, self.held = self.held or [], None
        for message in held:
            self.take(controller, message)
