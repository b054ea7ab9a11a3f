"""Runs the server until a signal ends it."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable

import uvicorn

from fastspec.server.app import app_of
from fastspec.server.service import Service


def listening(host: str, port: int) -> socket.socket:
    """A socket that takes connections; port 0 is any free one.

    Raises:
        ValueError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise ValueError(f"cannot listen on {host}, port {port}: {error}; take another --host or --port") from error


class Server(uvicorn.Server):
    """Answers requests until SIGTERM, Ctrl-C or `should_exit`: then it takes no more, and finishes those it has.

    Args:
        service: what is served.
        api_key: that clients must send.
        drain: seconds that the last answers may take.
        started: called once requests are answered.
    """

    def __init__(
        self,
        service: Service,
        *,
        api_key: str | None = None,
        drain: float = 60.0,
        started: Callable[[], None] = lambda: None,
    ) -> None:
        app = app_of(service, api_key)
        quiet = {"log_level": "warning", "access_log": False, "server_header": False}
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=max(1, round(drain)), **quiet))  # type: ignore[arg-type]
        self._told = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's; then tells that it is done."""
        await super().startup(sockets)
        self._told()

    def serve_on(self, *sockets: socket.socket) -> None:
        """Serves until the end."""
        if threading.current_thread() is threading.main_thread():
            # after draining, uvicorn raises the signal again for the handler that was there before: this server's
            for one in (signal.SIGINT, signal.SIGTERM):
                signal.signal(one, self.handle_exit)
        self.run(sockets=list(sockets))
