"""Opens the sockets of the HTTP server, and runs the server until a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from fastspec.server.access import Access
from fastspec.server.app import app_of
from fastspec.server.errors import loading
from fastspec.server.service import Service

_AFTER = 10  # seconds in which cancelled answers send their last events, before uvicorn closes all connections
_WORKERS = 64  # limit of threads that tokenize prompts, render templates and compile grammars
_BACKLOG = 1024  # connections that wait to be accepted


def listening(host: str, port: int) -> socket.socket:
    """Opens a TCP socket that accepts connections. Port 0 takes any free port.

    Raises:
        ValueError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        made = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        # accepted connections inherit this option; asyncio sets it only if the protocol number is IPPROTO_TCP
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made
    except OSError as error:
        raise ValueError(f"cannot listen on {host}, port {port}: {error}; take another --host or --port") from error


@contextlib.contextmanager
def listening_at(path: Path) -> Iterator[socket.socket]:
    """Opens a Unix socket that accepts connections, and removes its file at the end of the block.

    An existing socket file is replaced if no process listens on it.

    Raises:
        ValueError: the path cannot be used.
    """
    made = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket() and _is_idle(path):
            path.unlink()
        made.bind(str(path))
        made.listen(_BACKLOG)
    except OSError as error:
        made.close()
        raise ValueError(f"cannot listen on {path}: {error}; take another --uds") from error
    with made:
        try:
            yield made
        finally:
            path.unlink(missing_ok=True)


def _is_idle(path: Path) -> bool:
    """True if no process listens on the Unix socket at `path`."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) != 0


@dataclass(frozen=True, slots=True)
class Certificate:
    """Files for TLS, in PEM.

    Attributes:
        chain: file with the certificate, and the certificates that lead to its issuer.
        key: file with the private key, without a password.

    Raises:
        ValueError: a file cannot be read, or the key does not belong to the certificate.
    """

    chain: Path
    key: Path

    def __post_init__(self) -> None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.chain, self.key, password="")
        except (OSError, ssl.SSLError) as error:
            raise ValueError(
                f"cannot use {self.chain} and {self.key} for TLS: {error}; give PEM files that belong together, with a "
                "key that has no password"
            ) from error


def _config(app: ASGIApp, certificate: Certificate | None, drain: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=round(drain) + _AFTER,
        ssl_certfile=None if certificate is None else certificate.chain,
        ssl_keyfile=None if certificate is None else certificate.key,
    )


@contextlib.contextmanager
def answering_that_models_load(on: socket.socket, certificate: Certificate | None = None) -> Iterator[None]:
    """Answers requests in a thread with status 503, because the models are loading, until the block ends.

    Connections that clients open after the block wait until a server accepts them.

    Args:
        on: socket that accepts connections. It stays open after the block.
        certificate: files for TLS. None: plain HTTP.
    """
    server = uvicorn.Server(_config(_say_loading, certificate, drain=1))
    ours = on.dup()  # uvicorn closes the socket that it gets
    thread = threading.Thread(target=server.run, args=([ours],), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
        ours.close()


async def _say_loading(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a request with status 503, because the models are loading."""
    probe = scope["path"].endswith(("/health", "/ping"))
    body = json.dumps({"status": "loading"} if probe else loading().body).encode()
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"5")]
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


class Server(uvicorn.Server):
    """HTTP server. It runs until SIGTERM, Ctrl-C or `should_exit`, then completes the running answers.

    A second signal cancels the running answers. They are also cancelled `drain` seconds after the first one. Their
    clients then get an error.

    Args:
        service: decodes the answers.
        access: rules of access, and observers of requests. None: see `app_of`.
        drain: seconds in which running answers may complete after the first signal.
        certificate: files for TLS. None: plain HTTP.
        started: function that is called when the server is ready.
    """

    def __init__(
        self,
        service: Service,
        *,
        access: Access | None = None,
        drain: float = 60.0,
        certificate: Certificate | None = None,
        started: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(_config(app_of(service, access), certificate, drain))
        self._service, self._drain, self._told = service, drain, started
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts uvicorn, then calls the constructor's argument `started`."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(_WORKERS, "fastspec"))
        await super().startup(sockets)
        self._told()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shuts uvicorn down. Running answers are cancelled after `drain` seconds, background answers at the end."""
        timer = asyncio.get_running_loop().call_later(self._drain, self._service.end)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
            self._service.end()  # cancels answers in the background, which no client can fetch any more

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles SIGINT and SIGTERM.

        The first signal begins the shutdown, which waits for running answers. The second one cancels these answers.
        Later signals are handled by uvicorn: SIGINT closes all connections at once.
        """
        if self.should_exit and not self._service.cut_off and self._loop is not None:
            self._loop.call_soon_threadsafe(self._service.end)
        else:
            super().handle_exit(sig, frame)

    def serve_on(self, *sockets: socket.socket) -> None:
        """Answers requests that arrive on these sockets, until the server is told to end."""
        if threading.current_thread() is threading.main_thread():
            # after draining, uvicorn raises the signal again for the handler that was there before: this server's
            for one in (signal.SIGINT, signal.SIGTERM):
                signal.signal(one, self.handle_exit)
        self.run(sockets=list(sockets))
