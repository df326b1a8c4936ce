"""Traces of requests. Without an endpoint all of it does nothing, and costs nothing.

A front end makes one `Tracer` with `build`, starts a `RequestSpan` for each request and ends it in
one of two ways. The classes here are the ones that do nothing; `tracing_otel.py` has the others and
needs the extra `otel`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from urllib.parse import urlsplit

from cupaged.errors import ConfigError, NotSupportedError
from cupaged.outputs import RequestMetrics
from cupaged.sampling_params import SamplingParams

Metadata = Iterable[tuple[str, str | bytes]]

_PACKAGES = ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc")


class RequestSpan:
    """The span of one request. The first end counts, later ones do nothing."""

    def asked(self, operation: str, params: SamplingParams) -> None:
        """What is asked is known.

        Args:
            operation: "text_completion", or "chat" for messages.
            params: how to sample.
        """

    def finished(
        self,
        *,
        reasons: Sequence[str],
        num_prompt_tokens: int,
        num_tokens: int,
        times: RequestMetrics | None = None,
    ) -> None:
        """The request is answered to its end.

        Args:
            reasons: finish reason of each sample.
            num_prompt_tokens: tokens of the prompt.
            num_tokens: generated, over all samples.
            times: the engine's, on the clock `time.perf_counter`; they become events.
        """

    def failed(self, code: str, reason: str = "", error: BaseException | None = None) -> None:
        """The request ended with another status than OK.

        Args:
            code: name of the gRPC code.
            reason: that of the ErrorInfo, empty without one.
            error: told without what may be a part of the prompt.
        """


class Tracer:
    """Starts spans."""

    def start(
        self, method: str, *, request_id: str, stream: bool, metadata: Metadata = ()
    ) -> RequestSpan:
        """A request arrived.

        Args:
            method: of GenerationService, or SERVICE/METHOD of another one.
            request_id: the one that logs show.
            stream: whether the answer is a stream.
            metadata: of the call; `traceparent` and `tracestate` say what the span is a part of.
        """
        return _NO_SPAN

    def close(self, timeout_s: float = 2.0) -> None:
        """Export what is left, as far as it can be done in this time."""


_NO_SPAN = RequestSpan()


def check_endpoint(otlp_endpoint: str | None) -> None:
    """Check before any process is started; imports nothing of OpenTelemetry.

    Raises:
        ConfigError: it is no URL of http or https with a host.
        NotSupportedError: the packages are not installed.
    """
    if otlp_endpoint is None:
        return
    try:
        url = urlsplit(otlp_endpoint)
        good = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # a port that is none
        good = False
    if not good:
        allowed = "a URL such as http://localhost:4317 (https:// for TLS)"
        raise ConfigError("otlp_endpoint", otlp_endpoint, allowed)
    for package in _PACKAGES:
        if not _is_installed(package):
            raise NotSupportedError(
                f"otlp_endpoint asks for traces, but the package {package} is not installed: "
                "pip install 'cupaged[otel]'"
            )


def build(otlp_endpoint: str | None, *, model_name: str) -> Tracer:
    """A tracer that exports over OTLP and gRPC, or one that does nothing without an endpoint.

    The standard variables of OpenTelemetry hold, such as OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER and
    OTEL_EXPORTER_OTLP_HEADERS.

    Args:
        otlp_endpoint: URL of a collector; http:// is plain text, https:// is TLS.
        model_name: the first served name.

    Raises:
        ConfigError, NotSupportedError: as in `check_endpoint`.
    """
    check_endpoint(otlp_endpoint)
    if otlp_endpoint is None:
        return Tracer()
    from cupaged.server.tracing_otel import exporting_tracer

    return exporting_tracer(otlp_endpoint, model_name)


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:  # the package that it is a part of is missing
        return False
