"""One agreement after another of the ranks of an optimizer on what their gradients are."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress

from hvd_cluster.engine.membership import running_engine
from hvd_cluster.engine.reduction_config import ReductionConfig
from hvd_cluster.errors import DUPLICATE_NAME_TEXT, HorovodInternalError
from hvd_cluster.settings import Settings
from hvd_cluster.torch import remedies
from hvd_cluster.torch.gradient_layout import GradientLayout, begin_layout
from hvd_cluster.torch.parameter_index import ParameterIndex
from hvd_cluster.torch.step import Step


class Agreement:
    """Agrees on layouts with the other ranks.

    Args:
        index: the optimizer's parameters.
        config: how gradients are reduced.
        number: unique among the optimizers of this process.
        maker: the thread that has made the optimizer.
    """

    def __init__(self, index: ParameterIndex, config: ReductionConfig, number: int, maker: int) -> None:
        self._index = index
        self._config = config
        self._number = number
        self._maker = maker
        #: Waits for the layout on which the ranks are agreeing.
        self._pending: Callable[[], GradientLayout] | None = None

    def reach(self, step: Step, repeated: Collection[int], *, is_last: bool) -> GradientLayout:
        """Agree on a layout; continues the last call if an exception of a signal handler has ended that.

        Args:
            step: what this rank knows.
            repeated: parameters whose gradients re-entrant checkpoints accumulate repeatedly.
            is_last: this rank has called ``step()`` and finds no further gradients in this step.

        Raises:
            ValueError: two threads agree under one name, or the parameters have different names, shapes or dtypes on
                some ranks; raised on all ranks.
            HorovodInternalError: the ranks have different numbers of parameters, or the world has ended.
        """
        if self._pending is None:
            index = self._index
            # Repeated gradients are complete only at the end.
            ready = sorted(step.ready, key=lambda number: number in repeated)
            unknown = None if step.plan is None else step.plan.unknown
            try:
                self._pending = begin_layout(
                    index.gradients(self._config.keeps_sparse, step.last_passes, step.ready),
                    index.unfrozen(range(len(index))),
                    index.assign_buckets(ready, Settings.from_env().fusion_threshold_bytes, unknown),
                    name=self._name(),
                    number=self._number,
                    names_fingerprint=index.fingerprint,
                    spec_fingerprints=index.spec_fingerprints,
                    process_set=self._config.process_set,
                    is_last=is_last,
                )
            except ValueError as error:
                if DUPLICATE_NAME_TEXT not in str(error):
                    raise
                running_engine().abort(remedies.TWO_THREADS)  # the other ranks may have waited
                raise ValueError(remedies.TWO_THREADS) from None
        try:
            layout = self._pending()
        except (HorovodInternalError, ValueError):
            self._pending = None
            raise
        self._pending = None
        self._index.require_equal_specs(layout.mismatched)
        return layout

    def _name(self) -> str:
        """The name of the request, equal on all ranks.

        One name for all optimizers shows at once that ranks have different ones. But those of several threads agree at
        the same time, in another order on each rank, so the names of their parameters distinguish them.
        """
        common = "DistributedOptimizer.layout"
        return common if self._maker == running_engine().starter else f"{common}.{self._index.fingerprint}"

    def discard(self) -> None:
        """Wait for the layout on which the ranks are agreeing, and forget it."""
        if self._pending is not None:
            with suppress(HorovodInternalError, ValueError):
                self._pending()
            self._pending = None
