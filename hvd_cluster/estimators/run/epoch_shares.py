"""What the steps of an epoch spend their time on, and how busy the hosts are."""

from __future__ import annotations

from operator import sub

from hvd_cluster.engine import current
from hvd_cluster.monitor.node_usage import NodeMeter
from hvd_cluster.monitor.report_text import shares
from hvd_cluster.monitor.step_clock import StepTime, step_clock


class EpochShares:
    """The numbers of this rank.

    Args:
        measures_host: this is the rank that measures its host.
    """

    def __init__(self, measures_host: bool) -> None:
        self._counted = step_clock.totals[1]
        self._meter = NodeMeter() if measures_host else None

    def take(self) -> dict[str, float]:
        """Each activity's share in the steps since the last call; zeros without steps.

        The first step of a world is not measured. What happens between two epochs, such as validation, belongs to the
        first step of the later one.
        """
        before, self._counted = self._counted, step_clock.totals[1]
        return shares([StepTime(*map(sub, self._counted, before))])

    def usage(self) -> dict[str, dict[str, float]]:
        """Host name -> its percentages since the last call; empty on its other ranks."""
        if self._meter is None or not (numbers := self._meter.measure().metrics()):
            return {}
        return {current.topology().host: numbers}
