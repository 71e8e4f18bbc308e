from __future__ import annotations

import sys
from importlib.util import find_spec

import cloudpickle
import pytest
import torch
import torch.nn.functional as F

from hvd_cluster.estimators import TorchEstimator

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def imported_tensorflow():
    return "tensorflow" in sys.modules


def logged(folder):
    """The losses in TensorBoard's files, read in a worker: the reader leaves variables behind."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from hvd_cluster.estimators.run.scalars import without_tensorflow

    with without_tensorflow():
        events = EventAccumulator(folder)
        events.Reload()
    parts = ("train", "validation")
    return {part: [(event.step, event.value) for event in events.Scalars(f"loss/{part}")] for part in parts}


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_reads_the_losses_of_a_fit(frame, one_worker, tmp_path):
    net = torch.nn.Linear(4, 1)
    given = {"loss": F.mse_loss, "feature_cols": ["x"], "label_cols": ["y"], "epochs": 3, "verbose": 0}
    fit = TorchEstimator(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.05), validation=0.2, **given)
    before = one_worker.run(imported_tensorflow)
    model = fit.setBackend(one_worker).setStore(tmp_path).setRunId("r").fit(frame)
    assert one_worker.run(imported_tensorflow) == before
    (found,) = one_worker.run(logged, (str(tmp_path / "runs" / "r" / "logs"),))
    assert found == {
        part: [(record["epoch"], pytest.approx(record[part]["loss"], rel=1e-5)) for record in model.getHistory()]
        for part in ("train", "validation")
    }
