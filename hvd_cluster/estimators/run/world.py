"""The world of a fit's workers, for the time of one call in each of them."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_cluster.estimators.spec import FitSpec


@contextlib.contextmanager
def entered(spec: FitSpec) -> Iterator[Any]:
    """``hvd_cluster.torch``, initialised; shut down again if it was not before."""
    import hvd_cluster.torch as hvd

    if spec.mp_start_method is not None:
        multiprocessing.set_start_method(spec.mp_start_method, force=True)
    mine = not hvd.is_initialized()
    hvd.init()
    try:
        yield hvd
    finally:
        if mine:
            hvd.shutdown()
