"""Sockets, keys and metrics of the server, without a model."""

from __future__ import annotations

import socket
from itertools import pairwise

import pytest
from starlette.requests import Request

from fastspec.server.access import Access
from fastspec.server.errors import Refusal
from fastspec.server.metrics import Meters, buckets_to
from fastspec.server.run import listening


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_first_bytes_of_answers_do_not_wait_for_acknowledgements(host: str) -> None:
    """Nagle's algorithm holds small segments back until earlier ones are acknowledged: 40 ms on Linux."""
    try:
        server = listening(host, 0)
    except ValueError:
        pytest.skip("this machine has no IPv6")
    with server, socket.create_connection(server.getsockname()[:2]), server.accept()[0] as accepted:
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def request_with(authorization: str | None) -> Request:
    headers = [] if authorization is None else [(b"authorization", authorization.encode("latin-1"))]
    return Request({"type": "http", "headers": headers})


@pytest.mark.parametrize("sent", ["Bearer secret", "bearer secret", "Bearer  secret", "bearer secret "])
def test_the_scheme_of_a_key_has_no_case(sent: str) -> None:
    Access(("another", "secret")).check(request_with(sent))


@pytest.mark.parametrize("sent", [None, "", "secret", "Basic secret", "Bearer", "Bearer Secret", "Bearer secret2"])
def test_other_keys_are_refused(sent: str | None) -> None:
    with pytest.raises(Refusal, match="wants its API key"):
        Access(("another", "secret")).check(request_with(sent))


@pytest.mark.parametrize("longest", [1e-3, 0.5, 10.0, 60.0, 600.0, 3600.0, 86400.0])
def test_histograms_reach_the_longest_request(longest: float) -> None:
    bounds = buckets_to(longest)
    assert bounds[-1] == longest
    assert bounds == sorted(set(bounds))
    assert all(after <= 3 * before for before, after in pairwise(bounds))
    meters = Meters(longest)
    meters.whole.observe(0.99 * longest)
    buckets = {sample.labels["le"]: sample.value for metric in meters.whole.collect() for sample in metric.samples
               if sample.name.endswith("_bucket")}  # fmt: skip
    assert buckets[str(float(longest))] == 1.0
