"""The server's numbers in the form of Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from grpo.extras.serve.batching import Batching


class ServeMetrics:
    """The numbers of one server. Mutable: requests change them."""

    def __init__(self, batching: Batching) -> None:
        self.registry = CollectorRegistry()
        both = {"registry": self.registry}
        self.requests = Counter("grpo_serve_requests", "requests that ended", ["path", "status"], **both)
        self.seconds = Histogram("grpo_serve_request_seconds", "time to answer", ["path"], **both)
        self.tokens = Counter("grpo_serve_tokens", "tokens read (prompt) and sampled (completion)", ["kind"], **both)
        gauges = {
            "requests_waiting": ("requests that wait for the engine", lambda: len(batching.waiting)),
            "requests_running": ("requests that are being sampled", lambda: len(batching.running)),
            "paused": ("1 while sampling is paused", lambda: batching.paused),
            "weights_version": ("version of the weights; -1 before there are any", lambda: version_of(batching)),
        }
        for name, (words, value) in gauges.items():
            Gauge(f"grpo_serve_{name}", words, **both).set_function(value)

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Count a request that ended. path: of the endpoint. status: of HTTP."""
        self.requests.labels(path, status).inc()
        self.seconds.labels(path).observe(seconds)


def version_of(batching: Batching) -> int:
    """Return the version of the engine's weights; -1 before there are any."""
    version = batching.engine and batching.engine.version
    return -1 if version is None else version
