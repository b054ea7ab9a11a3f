"""Runs the server until a signal ends it."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn

from fastspec.server.app import app_of
from fastspec.server.service import Service


def listening(host: str, port: int) -> socket.socket:
    """Opens a socket that accepts connections; port 0 takes any free one.

    Raises:
        ValueError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        made = socket.create_server((host, port), family=family, backlog=1024)
        # accepted connections inherit it; asyncio sets it only on sockets whose protocol number is IPPROTO_TCP
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made
    except OSError as error:
        raise ValueError(f"cannot listen on {host}, port {port}: {error}; take another --host or --port") from error


_AFTER = 10  # seconds for clients to take in that their answers were stopped


class Server(uvicorn.Server):
    """Answers requests until SIGTERM, Ctrl-C or `should_exit`, then completes the running answers.

    A second signal, or the end of `drain`, cancels them; their clients get an error.

    Args:
        service: answers the requests.
        api_key: that clients must send.
        drain: seconds for the last answers.
        started: called when the server is ready.
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
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=round(drain) + _AFTER, **quiet))  # type: ignore[arg-type]
        self._service, self._drain, self._told = service, drain, started
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts uvicorn, then calls `started`."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._told()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shuts uvicorn down; cancels answers that take too long."""
        timer = asyncio.get_running_loop().call_later(self._drain, self._service.end)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal as uvicorn does; the second one cancels the answers."""
        if self.should_exit and not self._service.cut_off and self._loop is not None:
            self._loop.call_soon_threadsafe(self._service.end)
        else:
            super().handle_exit(sig, frame)

    def serve_on(self, *sockets: socket.socket) -> None:
        """Serves until the end."""
        if threading.current_thread() is threading.main_thread():
            # after draining, uvicorn raises the signal again for the handler that was there before: this server's
            for one in (signal.SIGINT, signal.SIGTERM):
                signal.signal(one, self.handle_exit)
        self.run(sockets=list(sockets))
