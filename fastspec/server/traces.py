"""OpenTelemetry spans of HTTP requests. Needs the package's extra `otel`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fastspec.server.request_log import RequestRecord

if TYPE_CHECKING:  # so this file can be imported without OpenTelemetry
    from opentelemetry.sdk.trace.export import SpanExporter

# name in `RequestRecord.facts` -> attribute of a span, as OpenTelemetry names it; times as vLLM names them
_NAMES: Final = {
    "id": "gen_ai.request.id",
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "fastspec.cached_tokens",
    "drafted_tokens": "fastspec.drafted_tokens",
    "accepted_tokens": "fastspec.accepted_tokens",
    "queue_seconds": "gen_ai.latency.time_in_queue",
    "first_token_seconds": "gen_ai.latency.time_to_first_token",
    "total_seconds": "gen_ai.latency.e2e",
    "method": "http.request.method",
    "path": "url.path",
    "status": "http.response.status_code",
}


class Traces:
    """Makes an OpenTelemetry span for each request.

    The parent of the span is named by the request's header traceparent (W3C Trace Context).

    Args:
        exporter: sends the spans. A separate thread calls it.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "fastspec"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("fastspec")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to(cls, endpoint: str) -> Traces:
        """Makes a `Traces` object that sends spans to a URL, such as http://host:4318/v1/traces, by OTLP over HTTP."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return cls(OTLPSpanExporter(endpoint))

    def __call__(self, record: RequestRecord) -> None:
        """Makes the span of an ended request. Successful requests of monitoring tools get no span."""
        if record.is_usual_probe:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode

        facts = {_NAMES[name]: value for name, value in record.facts().items() if value is not None}
        span = self._tracer.start_span(
            f"{record.method} {record.path}",
            context=self._propagator.extract(record.headers),
            kind=SpanKind.SERVER,
            start_time=record.started,
            attributes=facts,
        )
        if record.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(record.started + int(record.seconds * 1e9))

    def close(self) -> None:
        """Sends the last spans, and stops the exporter."""
        self._provider.shutdown()
