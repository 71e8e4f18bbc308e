"""The engine's monitor: reports of steps, and samples of ranks that others await.

Every few seconds each rank sends the times of its steps to the root, which says what slows the job down
(:mod:`hvd_cluster.monitor`). While other ranks wait for this one, the engine's thread looks 50 times a second where the
training thread is; while none does, it looks less and less often whether one does. The ranks of a host see in the
ballot that others wait. Between hosts the root informs ranks that have not reported what others have.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from hvd_cluster.engine.messages import Awaited, StepReport
from hvd_cluster.engine.negotiation import Negotiator
from hvd_cluster.engine.shared_memory.ballot import Ballot
from hvd_cluster.engine.submission_queue import SubmissionQueue
from hvd_cluster.engine.timeline.recorder import Recorder
from hvd_cluster.engine.world import World
from hvd_cluster.monitor.job_monitor import JobMonitor
from hvd_cluster.monitor.metrics import MetricsServer
from hvd_cluster.monitor.node_usage import NodeMeter
from hvd_cluster.monitor.rank_report import RankReporter
from hvd_cluster.monitor.step_clock import step_clock
from hvd_cluster.settings import Settings

logger = logging.getLogger(__name__)

_SAMPLE_S = 0.02
#: The longest pause between two looks while no rank waits: each interrupts what the training thread computes.
_MAX_PAUSE_S = 4 * _SAMPLE_S
#: How long a rank counts as awaited after it was informed.
_AWAITED_S = 2.5 * _SAMPLE_S
#: Each rank reports at this part of the intervals since its world began, the root writes at their end: after that.
_REPORT_PHASE = 0.9
#: How long the end of a world waits for the summary to be written.
_CLOSE_TIMEOUT_S = 5.0


class StepReports:
    """One rank's part.

    Args:
        world: its ranks and hosts.
        settings: whether to monitor, and how often to report.
        negotiator: knows at the root which ranks are missing.
        ballot: shows that ranks of this host wait; None if they share no memory.
        submissions: the requests of this rank.
        recorder: keeps the reports of this rank too, while a timeline is recorded.
        send_up: sends a message to the parent in the tree; not called at the root.
        send_down: sends a message to some children.
    """

    def __init__(
        self,
        world: World,
        settings: Settings,
        *,
        negotiator: Negotiator,
        ballot: Ballot | None,
        submissions: SubmissionQueue,
        recorder: Recorder,
        send_up: Callable[[StepReport], None],
        send_down: Callable[[Awaited, Sequence[int]], None],
    ) -> None:
        self._rank = world.topology.rank
        self._position = world.tree_position
        self._negotiator = negotiator
        self._ballot = ballot
        #: Those that do not see in the ballot of this host that they are awaited.
        self._children = list(self._position.children if ballot is None else self._position.remote_children)
        self._submissions = submissions
        self._recorder = recorder
        self._send_up = send_up
        self._send_down = send_down
        self._interval_s = settings.monitor_interval_s
        self._sends = settings.monitors
        self._has_failed = False
        #: At the root of a monitored job.
        self.job: JobMonitor | None = None
        self._output: MonitorOutput | None = None
        self._awaited_until_s = 0.0
        self._sampled_s = 0.0
        self._pause_s = _SAMPLE_S
        usage = NodeMeter().measure if self._sends and self._position.is_leader else None
        self._reporter = RankReporter(self._rank, world.topology.size, step_clock, usage)
        now_s = time.monotonic()
        self._next_sample_s = now_s + _SAMPLE_S
        self._next_report_s = now_s + _REPORT_PHASE * self._interval_s
        if self._sends and self._position.parent is None:
            self.job = JobMonitor(world.hosts)
            self._output = MonitorOutput(self.job, settings)

    @property
    def _is_on(self) -> bool:
        return (self._sends or self._recorder.enabled) and not self._has_failed

    @property
    def next_s(self) -> float | None:
        """When :meth:`tick` has something to do, or None."""
        return min(self._next_sample_s, self._next_report_s) if self._is_on else None

    def tick(self) -> None:
        """Look at the training thread, and report, if it is time."""
        if not self._is_on:
            return
        with self._or_off():
            self._tick(time.monotonic())

    def _tick(self, now_s: float) -> None:
        if now_s >= self._next_sample_s:
            is_active = self._position.parent is None and self._inform_awaited(now_s)
            if threading.get_ident() != step_clock.thread and self._is_awaited(now_s):
                self._reporter.call_sites.sample()
                is_active = True
            self._pause_s = _SAMPLE_S if is_active else min(2 * self._pause_s, _MAX_PAUSE_S)
            self._sampled_s, self._next_sample_s = now_s, now_s + self._pause_s
        if now_s >= self._next_report_s:
            self._next_report_s = next_beat(self._next_report_s, self._interval_s, now_s)
            self._report()

    def report(self) -> None:
        """Report to the root and the timeline what has happened since the last report."""
        with self._or_off():
            self._report()

    def _report(self) -> None:
        if self._has_failed:
            return
        report = self._reporter.report()
        self._recorder.note_report(report)
        if not self._sends:
            return
        if self.job is not None:
            self.job.add(report)
        else:
            self._send_up(StepReport(report))

    def receive(self, message: StepReport | Awaited) -> None:
        """A message of another rank."""
        with self._or_off():
            if isinstance(message, Awaited):
                now_s = time.monotonic()
                self._note_awaited(now_s)
                self._send_down(message, self._children)
                self._next_sample_s = min(self._next_sample_s, max(now_s, self._sampled_s + _SAMPLE_S))
            elif self.job is not None:
                self.job.add(message.report)
            elif self._position.parent is not None:
                self._send_up(message)

    def close(self) -> None:
        """The world has ended: write the summary."""
        if self._output is not None:
            self._output.close()

    @contextmanager
    def _or_off(self) -> Iterator[None]:
        """Whatever the block raises switches the monitor of this rank off."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a job must not end because of its monitor
            self._has_failed = True
            logger.warning("rank %d: its monitor is off: %s: %s", self._rank, type(error).__name__, error)

    # ---- who is awaited ---------------------------------------------------------------------------------------------

    def _is_awaited(self, now_s: float) -> bool:
        """Other ranks wait for what this one has not submitted."""
        if now_s < self._awaited_until_s:
            return True
        if self._ballot is None:
            return False
        voted = sum(request.epoch >= 0 for request in self._submissions.pending().values())
        return self._ballot.is_awaited or self._ballot.num_open > voted

    def _inform_awaited(self, now_s: float) -> bool:
        """At the root: inform ranks that keep others waiting; True if there are any."""
        missing = self._negotiator.missing() if self._position.children else set()
        if not missing:
            return False
        if missing.intersection(self._position.host_ranks):
            self._note_awaited(now_s)
        self._send_down(Awaited(), [child for child in self._children if child in missing])
        return True

    def _note_awaited(self, now_s: float) -> None:
        if self._ballot is not None:
            self._ballot.note_awaited(_AWAITED_S)
        else:
            self._awaited_until_s = now_s + _AWAITED_S


class MonitorOutput:
    """Writes what the root knows: lines, a table at the end, and metrics.

    It does so in a thread of its own, with a line every few seconds.

    Args:
        job: collects the reports.
        settings: how often, whether to write lines, and where to serve metrics.
        collect: called first each time.
    """

    def __init__(self, job: JobMonitor, settings: Settings, collect: Callable[[], None] = lambda: None) -> None:
        self._job = job
        self._collect = collect
        self._writes = settings.monitor
        self._interval_s = settings.monitor_interval_s
        self._server = None if settings.metrics_port is None else MetricsServer.started(job, settings.metrics_port)
        self._last_step = -1
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvd-monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the summary; does not wait for an output that does not take it."""
        self._is_closed.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        due_s = time.monotonic() + self._interval_s
        try:
            while not self._is_closed.wait(due_s - time.monotonic()):
                due_s = next_beat(due_s, self._interval_s, time.monotonic())
                self._collect()
                self._write_line()
            self._collect()
            summary = self._job.summary()
            if self._writes and summary is not None:
                _write(summary)
        except Exception as error:  # noqa: BLE001 - a job must not end because of its monitor
            logger.warning("the monitor of the job ends: %s: %s", type(error).__name__, error)
        finally:
            if self._server is not None:
                self._server.close()

    def _write_line(self) -> None:
        job = self._job.steps()
        if self._writes and job is not None and job.step != self._last_step:
            self._last_step = job.step
            _write(job.line())


class LocalMonitor:
    """The monitor of a world of one rank.

    Args:
        host: its host.
        settings: how often to report.
    """

    def __init__(self, host: str, settings: Settings) -> None:
        self.job = JobMonitor([host])
        reporter = RankReporter(0, 1, step_clock, NodeMeter().measure)
        self._output = MonitorOutput(self.job, settings, lambda: self.job.add(reporter.report()))

    def close(self) -> None:
        """Write the summary."""
        self._output.close()


def next_beat(due_s: float, interval_s: float, now_s: float) -> float:
    """When to repeat what was due at ``due_s``: whole intervals later, without drift.

    At least half an interval from now.
    """
    return due_s + interval_s * math.ceil((now_s - due_s) / interval_s + 0.5)


def _write(text: str) -> None:
    """To where the warnings of this rank go; the launcher forwards it."""
    sys.stderr.write("".join(f"[monitor] {line}\n" for line in text.splitlines()))
    sys.stderr.flush()
