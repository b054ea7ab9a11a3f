"""Serves OpenAI's protocol on many machines with Ray Serve. Needs Ray.

A replica is one process with one generator, on one GPU or on CPUs, and with the HTTP routes of `fastspec serve`. Ray's
proxy sends requests to the replicas. Ray checks their health and replaces dead ones. Replicas do not communicate.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastspec.errors import UnsupportedOption
from fastspec.generator import FastSpecGenerator
from fastspec.models.pairs import public_name
from fastspec.server.access import Access, check_api_key
from fastspec.server.app import app_of
from fastspec.server.service import Limits, Service
from fastspec.shapes import FULL

if TYPE_CHECKING:  # so that this file can be imported without Ray
    from ray.serve import Application

REPLICA_HEADER = "Fastspec-Replica"  # header of every response; its value is the name of the replica
_DRAIN = 60.0  # seconds in which a replica that is stopped may complete its answers, the same as in `fastspec serve`
_OF_ONE_PROCESS = ("tensor_parallel", "draft_tensor_parallel")


def deployment(
    target: str,
    draft: str | None = None,
    *,
    name: str | None = None,
    api_key: str | None = None,
    limits: Mapping[str, float] | None = None,
    generator_options: Mapping[str, Any] | None = None,
    **ray_options: Any,
) -> Application:
    """Makes an application for `ray.serve.run`. It serves one target with its draft, over OpenAI's protocol.

    Args:
        target, draft: directories or Hub ids that every machine can read.
        name: model name for clients. None: the last part of the target's path, or its Hub id.
        api_key: key that clients must send. Ray stores it unencrypted among the deployment's arguments.
        limits: limits of each replica: `body`, `tokens`, `requests`, `seconds`, as in `--limit` of `fastspec serve`.
        generator_options: arguments of `FastSpecGenerator`.
        **ray_options: arguments of `ray.serve.deployment`, such as `num_replicas` and `autoscaling_config`. By default
            a replica gets one GPU (none with device "cpu"), and up to one minute to complete its answers when it is
            stopped. Ray sends a replica at most as many requests as `limits` allow.

    Raises:
        UnsupportedOption, ValueError: an argument that a replica cannot have. Nothing was started then.
    """
    from ray import serve

    options = {"progress": False, **(generator_options or {})}
    _check(options, limits or {})
    if api_key is not None:
        check_api_key(api_key)
    chosen = Limits(**(limits or {}))  # type: ignore[arg-type]
    actor = dict(ray_options.pop("ray_actor_options", None) or {})
    if str(options.get("device")) != "cpu":
        actor.setdefault("num_gpus", 1)  # without num_gpus Ray hides all GPUs, and the replica would run on the CPU
    if actor.get("num_gpus", 0) > 1:
        wrong = f"ray_actor_options num_gpus={actor['num_gpus']}: a replica runs on one GPU"
        raise UnsupportedOption(f"{wrong}; give it 1, and num_replicas more")
    usual = {
        "name": "fastspec",
        "max_ongoing_requests": chosen.requests,
        "graceful_shutdown_timeout_s": min(_DRAIN, chosen.seconds),
    }
    made = serve.deployment(**{**usual, **ray_options, "ray_actor_options": actor})(Replica)
    return made.bind(target, draft, name or public_name(target), api_key, chosen, options)


class Replica:
    """One generator with its HTTP routes. Ray makes the object in a process of its own.

    Args:
        target, draft, name, api_key, limits: see `deployment`, which has checked them.
        options: arguments of `FastSpecGenerator`.
    """

    def __init__(
        self, target: str, draft: str | None, name: str, api_key: str | None, limits: Limits, options: dict[str, Any]
    ) -> None:
        from ray import serve

        self._generator = FastSpecGenerator(target, draft, **options)
        self._generator.warmup(sampler=FULL)
        self._service = Service(self._generator, name, limits)
        self._answer = _Answer(
            app_of(self._service, Access(() if api_key is None else (api_key,))),
            serve.get_replica_context().replica_id.unique_id,
        )

    async def __call__(self, request: Request) -> Response:
        """Returns the response to a request. Ray then runs the response, which calls the HTTP routes."""
        return self._answer

    async def check_health(self) -> None:
        """Generates one token to see that the generator works. Ray replaces the replica if this raises an error."""
        # no check while requests run: it would wait for them, and they report errors themselves
        if not self._service.running:
            await self._generator.submit([0], max_new_tokens=1)

    def __del__(self) -> None:
        """Closes the generator. Ray calls it after the replica's last answers."""
        if hasattr(self, "_generator"):  # False if loading failed
            self._generator.close()


class _Answer(Response):
    """Response that runs an ASGI application, and adds a header with the name of the replica.

    Ray gives it the connection, so that each event of a stream is sent as soon as it exists.

    Args:
        app: the application with the HTTP routes.
        replica: name of the replica.
    """

    def __init__(self, app: ASGIApp, replica: str) -> None:
        super().__init__()
        self._app, self._header = app, (REPLICA_HEADER.lower().encode(), replica.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application on a connection, and adds the header to its response."""

        async def signed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], self._header]}
            await send(message)

        await self._app(scope, receive, signed)


def _check(options: Mapping[str, Any], limits: Mapping[str, float]) -> None:
    """Refuses arguments that no replica can have, before a replica is started.

    Args:
        options: arguments of `FastSpecGenerator`.
        limits: see `deployment`.
    """
    if several := [name for name in _OF_ONE_PROCESS if options.get(name) is not None]:
        raise UnsupportedOption(
            f"generator_options {', '.join(several)}: a replica is one process on one GPU; leave it out, and give "
            "num_replicas more"
        )
    known = set(inspect.signature(FastSpecGenerator).parameters) - {"target", "draft", *_OF_ONE_PROCESS}
    of_limits = {field.name for field in fields(Limits)}
    for what, given, wanted in (("generator_options", {*options}, known), ("limits", {*limits}, of_limits)):
        if unknown := sorted(given - wanted):
            raise UnsupportedOption(
                f"{what} {', '.join(unknown)} are not known, wanted some of {', '.join(sorted(wanted))}"
            )
