"""The page at /metrics: what all processes of the server count, as one.

The supervisor makes it from the files of the engine and of the front ends and from its own numbers.
With `compat="vllm"` each family that vLLM has as well is repeated under vLLM's name; nothing is
counted twice for that.
"""

from __future__ import annotations

import platform
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from prometheus_client import generate_latest
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from cupaged._version import __version__
from cupaged.errors import ConfigError
from cupaged.server.metric_table import (
    PREFIX,
    SUPERVISOR,
    TABLE,
    VLLM_LABELS,
    VLLM_PREFIX,
    MetricSpec,
)
from cupaged.server.metrics import SupervisorMetrics
from cupaged.server.serving_state import PHASES, ServingState

COMPATIBLE = ("vllm",)
_READ_TRIES = 3
_TOTAL = "_total"
_PLAIN = "text/plain; version=0.0.4; charset=utf-8"
_OPEN_METRICS = "application/openmetrics-text"
_Labels = dict[str, str]


class MetricsPage(Collector):
    """Renders the page; its methods may be called from several threads.

    Args:
        folder: that of `metrics.store_in` of all children.
        state: gives the present state.
        metrics: the supervisor's own numbers.
        model_name: the first served name.
        compat: "vllm" to repeat the families under vLLM's names.

    Raises:
        ConfigError: another `compat`.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        state: Callable[[], ServingState],
        metrics: SupervisorMetrics,
        model_name: str,
        compat: str | None = None,
    ) -> None:
        if compat is not None and compat not in COMPATIBLE:
            raise ConfigError("metrics_compat", compat, " or ".join(map(repr, COMPATIBLE)))
        self._files = MultiProcessCollector(None, path=str(folder))  # type: ignore[no-untyped-call]
        self._state = state
        self._metrics = metrics
        self._model_name = model_name
        self._compat = compat
        self._lock = threading.Lock()  # reading the files twice at a time would gain nothing

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The page and its content type, in the best format that an Accept header allows."""
        encoder: Callable[[Collector], bytes]
        try:
            encoder, content_type = choose_encoder(_with_names_as_they_are(accept))
        except (TypeError, ValueError):  # a version in the header that is none
            encoder, content_type = generate_latest, _PLAIN
        with self._lock:
            return encoder(self), content_type.partition("; escaping=")[0]

    def collect(self) -> Iterator[Metric]:
        """All families in the order of their names, then vLLM's."""
        families = sorted((*self._of_children(), *self._own()), key=lambda family: family.name)
        yield from families
        if self._compat == "vllm":
            by_name = {family.name: family for family in families}
            for spec in TABLE:
                family = by_name.get(_family_name(spec, spec.full_name))
                if family is not None:
                    for alias in spec.vllm:
                        yield _renamed(family, _family_name(spec, VLLM_PREFIX + alias))

    def _of_children(self) -> list[Metric]:
        """What the files hold. One that a child makes at this moment may be empty: try again."""
        for tries_left in reversed(range(_READ_TRIES)):
            try:
                return list(self._files.collect())  # type: ignore[no-untyped-call]
            except (struct.error, RuntimeError):
                if not tries_left:
                    raise
                time.sleep(0.01)
        raise AssertionError("the loop returns or raises")

    def _own(self) -> Iterator[Metric]:
        state, model = self._state(), {"model_name": self._model_name}
        samples: dict[str, list[tuple[_Labels, float]]] = {
            "build_info": [
                ({"version": __version__, "python_version": platform.python_version()}, 1)
            ],
            "server_state": [
                (model | {"state": phase}, float(phase == state.phase)) for phase in PHASES
            ],
            "frontends_listening": [(model, state.num_listening)],
            "engine_restarts_total": [(model, self._metrics.engine_restarts)],
            "frontend_restarts_total": [(model, self._metrics.frontend_restarts)],
        }
        for spec in SUPERVISOR:
            name = _family_name(spec, PREFIX + spec.name)
            family = Metric(name, spec.documentation, spec.kind)
            for labels, value in samples[spec.name]:
                family.add_sample(spec.full_name, labels, value)
            yield family


def _with_names_as_they_are(accept: str) -> str:
    """An Accept header that asks for names without escaping; all on the page are legal anywhere.

    prometheus_client 0.26 would replace the colon of `vllm:` in OpenMetrics otherwise.
    """
    media = []
    for one in accept.split(","):
        kind, *rest = (part.strip() for part in one.split(";"))
        parameters = [part for part in rest if not part.startswith("escaping=")]
        if kind == _OPEN_METRICS and not any(part.startswith("version=") for part in parameters):
            parameters.append("version=1.0.0")
        media.append(";".join((kind, *parameters, "escaping=allow-utf-8")))
    return ",".join(media)


def _family_name(spec: MetricSpec, name: str) -> str:
    """The library keeps the family of a counter without its suffix."""
    return name.removesuffix(_TOTAL) if spec.kind == "counter" else name


def _renamed(family: Metric, name: str) -> Metric:
    copy = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        labels = {VLLM_LABELS.get(label, label): value for label, value in sample.labels.items()}
        copy.add_sample(
            name + sample.name.removeprefix(family.name), labels | {"engine": "0"}, sample.value
        )
    return copy
