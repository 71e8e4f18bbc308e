"""Successive agreements of an optimizer's ranks on what their gradients are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import suppress

from hvd_cluster.engine.membership import running_engine
from hvd_cluster.engine.reduction_config import ReductionConfig
from hvd_cluster.errors import DuplicateNameError, HorovodInternalError
from hvd_cluster.settings import Settings
from hvd_cluster.torch.error_texts import TWO_THREADS
from hvd_cluster.torch.gradient_layout import GradientLayout, begin_layout
from hvd_cluster.torch.parameter_index import ParameterIndex
from hvd_cluster.torch.plan import Plan
from hvd_cluster.torch.step import Step


class LayoutAgreement:
    """Agrees on layouts with the other ranks.

    Args:
        index: the optimizer's parameters.
        config: how gradients are reduced.
        number: unique among the optimizers of this process.
        maker: the thread that has made the optimizer.
    """

    def __init__(self, index: ParameterIndex, config: ReductionConfig, number: int, maker: threading.Thread) -> None:
        self._index = index
        self._config = config
        self._number = number
        self._maker = maker
        #: All ranks were at the end of the step when they last agreed; otherwise they agree again there.
        self.was_last = True
        #: Waits for the layout on which the ranks are agreeing.
        self._pending: Callable[[], GradientLayout] | None = None

    @property
    def is_pending(self) -> bool:
        """The ranks are agreeing on a layout: :meth:`reach` gives it."""
        return self._pending is not None

    def begin(self, step: Step, repeated: Collection[int], *, is_last: bool) -> None:
        """Begin to agree on a layout.

        The last agreement continues if a signal handler's exception has ended the last :meth:`reach`.

        Args:
            step: what this rank knows.
            repeated: parameters whose gradients re-entrant checkpoints accumulate repeatedly.
            is_last: this rank has called ``step()`` and finds no further gradients in this step.

        Raises:
            ValueError: two threads agree under one name.
        """
        if self._pending is not None:
            return
        index = self._index
        # Repeated gradients are complete only at the end.
        ready = sorted(step.ready, key=lambda number: number in repeated)
        unknown = None if step.plan is None else step.plan.unknown
        try:
            self._pending = begin_layout(
                index.gradients(self._config.keeps_sparse, step.last_passes, step.ready),
                index.unfrozen(range(len(index))),
                index.assign_buckets(ready, Settings.from_env().fusion_threshold_bytes, unknown),
                name=self._name(step),
                number=self._number,
                names_fingerprint=index.fingerprint,
                spec_fingerprints=index.spec_fingerprints,
                process_set=self._config.process_set,
                is_last=is_last,
            )
        except DuplicateNameError:
            running_engine().abort(TWO_THREADS)  # the other ranks may have waited
            raise ValueError(TWO_THREADS) from None

    def is_settled(self, step: Step, plan: Plan) -> bool:
        """In ``step()``: whether no rank agrees on a further layout."""
        return self.was_last and not self.is_pending and (step.has_agreed or not step.awaits_gradients(plan))

    def reach(self, step: Step) -> Plan:
        """Wait until all ranks have begun, and return the plan with what is new in it.

        The step then follows this plan.

        Raises:
            ValueError: the parameters have different names, shapes or dtypes on some ranks; raised on all ranks.
            HorovodInternalError: the ranks have different numbers of parameters, or the world has ended.
        """
        assert self._pending is not None
        try:
            layout = self._pending()
        except (HorovodInternalError, ValueError):
            self._pending = None
            raise
        self._pending = None
        self._index.require_equal_specs(layout.mismatched)
        plan = Plan.of(layout, len(self._index)) if step.plan is None else step.plan.grown(layout)
        step.follow(plan, is_agreed=layout.is_complete)
        step.has_agreed = True
        self.was_last = layout.is_last
        return plan

    def _name(self, step: Step) -> str:
        """The name of the request, equal on all ranks.

        One name for the first layouts of all optimizers shows at once that ranks have different ones. But those of
        several threads agree at the same time, in another order on each rank, so the names of their parameters
        distinguish them.
        """
        if step.agreed_plan is not None:
            return f"{step.agreed_plan.label}.layout"
        common = "DistributedOptimizer.layout"
        return common if self._maker is running_engine().starter else f"{common}.{self._index.fingerprint}"

    def discard(self) -> None:
        """Wait for the layout on which the ranks are agreeing, and forget it."""
        if self._pending is not None:
            with suppress(HorovodInternalError, ValueError):
                self._pending()
            self._pending = None
