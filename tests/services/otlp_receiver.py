"""A real OTLP receiver inside the test process, over gRPC or HTTP: what a collector would get."""

from __future__ import annotations

import threading
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Received:
    """Requests as they came, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: list[ExportTraceServiceRequest] = []

    def add(self, request: ExportTraceServiceRequest) -> None:
        with self._lock:
            self._requests.append(request)

    def spans(self) -> list[tuple[str, Span]]:
        """Each span with its service's name."""
        with self._lock:
            requests = list(self._requests)
        return [
            (
                next(one.value.string_value for one in group.resource.attributes if one.key == "service.name"),
                span,
            )
            for request in requests
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]


class GrpcReceiver(TraceServiceServicer):
    """Listens on loopback while in its ``with`` block."""

    def __init__(self) -> None:
        self.received = Received()

    def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:  # noqa: N802
        self.received.add(request)
        return ExportTraceServiceResponse()

    def __enter__(self) -> GrpcReceiver:
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
        add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()


class HttpReceiver:
    """Listens on loopback while in its ``with`` block."""

    def __init__(self) -> None:
        self.received = Received()

    def __enter__(self) -> HttpReceiver:
        received = self.received

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path == "/v1/traces":
                    received.add(ExportTraceServiceRequest.FromString(body))
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
