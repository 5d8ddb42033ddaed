"""Sends spans to a collector over OTLP/HTTP, with OpenTelemetry's SDK: a bounded queue and a thread. Spans that do not fit the
queue are dropped. Imported only if an endpoint is given.
"""

from threading import Thread
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, StatusCode, TraceFlags, set_span_in_context

from gateway.tracing.context import TraceContext
from gateway.tracing.spans import Span
from gateway.tracing.tracer import seconds_to_unix_ns
from runtime.process.version import version_of

PATH: Final = "/v1/traces"
QUEUED_MAX: Final = 16_384  # spans that wait; about 20 MB
TIMEOUT_S: Final = 5.0  # of one request to the collector
CLOSE_WAIT_S: Final = 2.0


class _Ids(RandomIdGenerator):
    trace_id = 0  # of the next root span

    def generate_trace_id(self) -> int:
        return self.trace_id


class SpanExport:
    """Used on the event loop's thread."""

    def __init__(self, endpoint: str, process: str) -> None:
        own = {"service.name": "crossdock", "service.instance.id": process, "service.version": version_of()}
        self._ids = _Ids()
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            id_generator=self._ids,
            resource=Resource(own).merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,
        )
        url = endpoint if endpoint.endswith(PATH) else endpoint.rstrip("/") + PATH
        exporter = OTLPSpanExporter(endpoint=url, timeout=TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=QUEUED_MAX))
        self._tracer = self._provider.get_tracer("crossdock", version_of())

    def emit(self, context: TraceContext, root: Span) -> None:
        parent = Context()
        if context.parent_id:
            remote = SpanContext(context.trace_id, context.parent_id, True, TraceFlags(TraceFlags.SAMPLED))
            parent = set_span_in_context(NonRecordingSpan(remote), parent)
        self._ids.trace_id = context.trace_id
        to_ns = seconds_to_unix_ns()
        waiting = [(root, parent, SpanKind.SERVER)]
        while waiting:
            span, above, kind = waiting.pop()
            attributes = {name: value for name, value in span.attributes.items() if value not in (None, "", [])}
            made = self._tracer.start_span(span.name, above, kind, attributes, start_time=to_ns(span.start))
            if "error.type" in attributes:
                made.set_status(StatusCode.ERROR)
            made.end(to_ns(span.end))
            within = set_span_in_context(made, above)
            waiting += ((child, within, SpanKind.INTERNAL) for child in span.children)

    def close(self) -> None:
        """Send what is left, if the collector takes it in time."""
        closing = Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_WAIT_S)
