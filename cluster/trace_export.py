"""Traces on their way to an OpenTelemetry collector or into a file, in a thread that the run never waits for."""

from __future__ import annotations

import base64
import json
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from google.protobuf.json_format import MessageToDict
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Status, StatusCode, set_span_in_context

from headway.cluster.ledger import cut_torn_tail
from headway.cluster.traces import Life, Span
from headway.core.config import Config
from headway.core.errors import ConfigError

MAX_WAITING = 16_384
"""Spans that wait to be sent; more are lost."""
SEND_EVERY_S = 2.0
SEND_DEADLINE_S = 5.0
"""For a batch of spans, with all tries."""
CLOSE_DEADLINE_S = 5.0
"""For the last spans, at the end of the run."""
LOGGER = "opentelemetry"
PATH = "/v1/traces"


class TraceExport:
    """Sends the lives of groups to `metrics.traces`. `say` is told the first fault, once. The environment's `OTEL_*`
    variables add headers, certificates and sampling."""

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        target = config.metrics.traces
        assert target is not None
        self._say = say
        self._target = target
        self._faults = _FirstFault(target, say)
        if target.endswith(".jsonl"):
            self._exporter: SpanExporter = _File(config.run_folder.resolve() / target)
        else:
            endpoint = target.rstrip("/").removesuffix(PATH) + PATH
            self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=SEND_DEADLINE_S)
        logger = logging.getLogger(LOGGER)
        self._propagates, logger.propagate = logger.propagate, False
        logger.addHandler(self._faults)
        about = Resource.create({"service.name": "headway", "headway.run": config.run.name})
        self._provider = TracerProvider(resource=about, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter, max_queue_size=MAX_WAITING, schedule_delay_millis=SEND_EVERY_S * 1000
            )
        )
        self._tracer = self._provider.get_tracer("headway")

    def send(self, life: Life, offset_ns: int) -> None:
        """A group that has ended. `offset_ns`: the time of day when the clock of its spans stood at 0."""

        def at(seconds: float) -> int:
            return offset_ns + round(seconds * 1e9)

        root_ended = life.root.ended
        assert root_ended is not None, life
        root = self._tracer.start_span(
            life.root.name, Context(), attributes=_named(life.root), start_time=at(life.root.began)
        )
        if not root.is_recording():  # not sampled, and so none of its children is
            return
        contexts: dict[Span | None, Context] = {None: set_span_in_context(root, Context())}
        for each in life.spans:
            span = self._tracer.start_span(
                each.name, contexts[each.parent], attributes=_named(each), start_time=at(each.began)
            )
            if each.failure is not None:
                span.set_status(Status(StatusCode.ERROR, each.failure))
            span.end(at(root_ended if each.ended is None else each.ended))
            contexts[each] = set_span_in_context(span, Context())
        for seconds, event in life.events:
            root.add_event(event, timestamp=at(seconds))
        root.end(at(root_ended))

    def close(self) -> None:
        """Sends what is left. Returns after `CLOSE_DEADLINE_S` at the latest."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True, name="last traces")
        ending.start()
        ending.join(CLOSE_DEADLINE_S)
        if ending.is_alive():
            self._faults.tell("the last traces were not taken in time")
            self._exporter.shutdown()  # ends the tries
            return
        logger = logging.getLogger(LOGGER)
        logger.removeHandler(self._faults)
        logger.propagate = self._propagates


class _File(SpanExporter):
    """Lines of OTLP's JSON encoding, as the collector's `file` exporter writes them. Raises `ConfigError`."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
            cut_torn_tail(path)
        except OSError as error:
            raise ConfigError(f"metrics.traces={path} cannot be written: {error.strerror}") from error

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        message = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
        for resource in message["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    for name in {"traceId", "spanId", "parentSpanId"} & span.keys():
                        span[name] = base64.b64decode(span[name]).hex()
        self._file.write(json.dumps(message).encode() + b"\n")
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.close()


class _FirstFault(logging.Handler):
    """Passes on the first thing that the library complains of, and keeps the rest from the terminal."""

    def __init__(self, target: str, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._target = target
        self._say = say
        self._told = False

    def emit(self, record: logging.LogRecord) -> None:
        cause = record.exc_info[1] if record.exc_info else None
        self.tell(f"{record.getMessage()}{f' {cause}' if cause else ''}")

    def tell(self, fault: str) -> None:
        if not self._told:
            self._told = True
            self._say(f"traces do not reach {self._target}, which the run does not wait for: {fault}")


def _named(span: Span) -> dict[str, str | int | float | bool]:
    return {f"headway.{name}": value for name, value in span.attributes.items() if value is not None}
