"""The monitor's numbers for Prometheus: OpenMetrics over HTTP, at the root.

``HOROVOD_METRICS_PORT`` sets the port.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from threading import Thread
from typing import Any

from hvd_cluster.errors import MissingExtraError
from hvd_cluster.monitor.job_monitor import JobMonitor
from hvd_cluster.monitor.step_clock import ACTIVITIES

logger = logging.getLogger(__name__)


class MetricsServer:
    """Serves ``/metrics`` in a thread.

    Args:
        server: listens already.
        thread: its thread.
    """

    def __init__(self, server: ThreadingHTTPServer, thread: Thread) -> None:
        self._server = server
        self._thread = thread

    @classmethod
    def started(cls, job: JobMonitor, port: int) -> MetricsServer | None:
        """Serve what ``job`` knows; None, with a warning, if that is not possible.

        Args:
            job: collects the reports.
            port: the port on all interfaces of this host, by IPv4 and IPv6; 0 for a free one.
        """
        try:
            from prometheus_client import CollectorRegistry, MetricsHandler
        except ImportError:
            logger.warning("%s", MissingExtraError("prometheus_client", "monitor", f"for HOROVOD_METRICS_PORT={port}"))
            return None
        registry = CollectorRegistry()
        registry.register(_Collector(job))
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        try:
            listening = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
        except OSError as error:
            logger.warning("HOROVOD_METRICS_PORT=%d cannot be served: %s", port, error)
            return None
        address = listening.getsockname()[:2]
        server = ThreadingHTTPServer(address, MetricsHandler.factory(registry), bind_and_activate=False)
        server.socket.close()
        server.socket = listening
        thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
        thread.start()
        logger.info("metrics: port %d, /metrics", address[1])
        return cls(server, thread)

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Collector:
    """What prometheus_client calls for each scrape."""

    def __init__(self, job: JobMonitor) -> None:
        self._job = job

    def describe(self) -> list[Any]:
        """Nothing: the families are known when they are collected."""
        return []

    def collect(self) -> Iterator[Any]:
        """The metric families."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        job = self._job.last_steps
        totals, num_last = self._job.counts()
        steps = CounterMetricFamily("hvd_steps", "Training steps of a rank", labels=["rank"])
        seconds = CounterMetricFamily(
            "hvd_step_seconds", "Seconds that a rank's steps spent on an activity", labels=["rank", "activity"]
        )
        for rank, (num, sums) in sorted(totals.items()):
            steps.add_metric([str(rank)], num)
            for activity, value in zip(ACTIVITIES, sums, strict=True):
                seconds.add_metric([str(rank), activity], value)
        last = CounterMetricFamily("hvd_last", "Steps in which the other ranks waited for this one", labels=["rank"])
        for rank in sorted(totals):
            last.add_metric([str(rank)], num_last.get(rank, 0))
        yield from (steps, seconds, last)
        usage = GaugeMetricFamily("hvd_host_usage", "Usage of a host, in percent", labels=["host", "resource"])
        for host, of in ({} if job is None else job.usage).items():
            for name, value in of.metrics().items():
                usage.add_metric([host, name.removesuffix("_percent")], value)
        yield usage
