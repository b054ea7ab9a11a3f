"""Spans of requests by the real OpenTelemetry SDK. Needs the extra `otel`."""

from __future__ import annotations

import pytest

pytest.importorskip("opentelemetry.sdk.trace", reason="runs with `make test-integrations`")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="runs with `make test-integrations`")

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from fastspec import FastSpecGenerator, demo_pair
from fastspec.server.access import Access
from fastspec.server.request_log import RequestRecord
from fastspec.server.traces import Traces
from tests.server.conftest import running
from tests.server.test_refusals import get, post

PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


def test_a_request_is_a_span_below_that_of_its_client() -> None:
    exporter = InMemorySpanExporter()
    traces = Traces(exporter)
    with (
        FastSpecGenerator(*demo_pair(), max_length=64, device="cpu", progress=False) as generator,
        running(generator, name="demo", access=Access(observers=(traces,))) as server,
    ):
        body = {"model": "demo", "prompt": "def", "max_tokens": 5}
        assert post(server, body, headers=PARENT)[0] == 200
        get(server, "/health")
    traces(RequestRecord("id", "GET", "/v1/models", {}, status=500, seconds=0.5))
    traces.close()
    asked, failed = exporter.get_finished_spans()
    assert (asked.name, asked.kind) == ("POST /v1/completions", SpanKind.SERVER)
    assert f"{asked.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert asked.parent is not None
    assert f"{asked.parent.span_id:016x}" == "b7ad6b7169203331"
    told = dict(asked.attributes or {})
    assert (told["gen_ai.request.model"], told["gen_ai.usage.output_tokens"]) == ("demo", 5)
    assert 0 < float(told["gen_ai.latency.time_to_first_token"]) <= float(told["gen_ai.latency.e2e"])  # type: ignore[arg-type]
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.end_time is not None
    assert failed.start_time is not None
    assert failed.end_time - failed.start_time == 500_000_000
