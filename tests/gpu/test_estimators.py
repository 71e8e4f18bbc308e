"""Fits on a GPU: the losses of the CPU, batches that are copied ahead, and a model that comes back on the CPU."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import torch

from hvd_cluster.data.reading.to_device import ToDevice
from hvd_cluster.estimators import Backend, LightningEstimator, TorchEstimator
from hvd_cluster.estimators.run.readers import RepeatedRow
from hvd_cluster.launch.local import Executor
from hvd_cluster.lightning.installed import lightning

lightning()  # its first import sets a variable
cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    rng = np.random.default_rng(7)
    x = rng.normal(size=(500, 4)).astype("float32")
    y = x @ np.array([1.0, -2.0, 0.5, 3.0], dtype="float32")
    return pd.DataFrame({"x": list(x), "y": y, "c": (y > 0).astype("int64"), "v": np.arange(500) % 5 == 0})


def copying_ahead(fn: Any, args: Any, kwargs: Any) -> Any:
    """Call ``fn``, with small batches copied as large ones are."""
    from hvd_cluster.data.reading import to_device

    to_device.MIN_BYTES = 0
    return fn(*args, **kwargs)


class Kept(Backend):
    """Runs fits in one worker: a new one for each would take longer than they."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> list[Any]:
        return self._executor.run(copying_ahead, (fn, args, kwargs or {}))

    def num_processes(self) -> int:
        return 1


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    with Executor(1, env={"OMP_NUM_THREADS": "1"}, verbose=0) as executor:
        yield Kept(executor)


def net(outputs: int = 1) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, outputs))


def shared(backend: Backend, label: str = "y") -> dict[str, Any]:
    """The arguments of every fit here."""
    columns = {"feature_cols": ["x"], "label_cols": [label]}
    return {**columns, "batch_size": 32, "random_seed": 1, "backend": backend, "verbose": 0}


def where_it_runs(record: dict[str, Any], model: torch.nn.Module) -> None:
    record["device"] = next(model.parameters()).device.type


def stacked(batch: dict[str, Any]) -> dict[str, Any]:
    return {"x": torch.from_numpy(np.stack(batch["x"]))}


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"backward_passes_per_step": 2},
    "clipped": {"gradient_clip_norm": 0.5},
    "bf16": {"mixed_precision": "bf16"},
    "fp16": {"mixed_precision": "fp16"},
    "zero1": {"sharding": "zero1"},
    "fsdp2": {"sharding": "fsdp2"},
    "in processes": {"reader_pool_type": "process"},
    "with preprocess": {"preprocess": stacked},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_fit_reaches_the_losses_of_the_cpu(frame: pd.DataFrame, backend: Any, name: str) -> None:
    def fit(use_gpu: bool, **variant: Any) -> Any:
        model = net()
        return TorchEstimator(
            model=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
            loss=torch.nn.functional.mse_loss,
            metrics=[torch.nn.functional.l1_loss],
            validation="v",
            epochs=3,
            use_gpu=use_gpu,
            callbacks=[where_it_runs],
            **shared(backend),
            **variant,
        ).fit(frame)

    variant = VARIANTS[name]
    precise = {key: value for key, value in variant.items() if key != "mixed_precision"}
    there, here = fit(True, **variant), fit(False, **precise)
    losses = [
        [record[part]["loss"] for record in model.getHistory() for part in ("train", "validation")]
        for model in (here, there)
    ]
    if name == "fp16":  # the scaler leaves out the first steps, until it has found a scale
        assert losses[1][-1] < losses[1][0]
    else:
        assert losses[1] == pytest.approx(losses[0], rel=3e-2 if name == "bf16" else 1e-3)
    assert {parameter.device.type for parameter in there.getModel().parameters()} == {"cpu"}
    scored = there.transform(frame.head(7))
    assert len(scored) == 7


def test_a_step_that_fails_ends_what_is_copied_ahead(frame: pd.DataFrame, backend: Any) -> None:
    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and output.is_cuda:
            raise ValueError("in the first step")
        return torch.nn.functional.mse_loss(output, label)

    model = net()
    estimator = TorchEstimator(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=loss,
        **shared(backend),
    )
    with pytest.raises(Exception, match="in the first step"):
        estimator.fit(frame)

    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate()]

    assert not [name for name in backend.run(names)[0] if name.startswith("hvd-to-device")]


def test_class_weights_and_row_weights_are_on_the_device(frame: pd.DataFrame, backend: Any) -> None:
    def fit(use_gpu: bool) -> Any:
        model = net(2)
        return TorchEstimator(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss=torch.nn.functional.cross_entropy,
            class_weights="balanced",
            epochs=2,
            use_gpu=use_gpu,
            **shared(backend, label="c"),
        ).fit(frame)

    there, here = (fit(use_gpu).getHistory()[-1]["train"]["loss"] for use_gpu in (True, False))
    assert there == pytest.approx(here, rel=1e-3)


def test_lightning_fits_on_the_gpu(frame: pd.DataFrame, backend: Any) -> None:
    def fit(use_gpu: bool) -> Any:
        model = net()
        return LightningEstimator(
            model=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
            loss=torch.nn.functional.mse_loss,
            validation="v",
            epochs=2,
            use_gpu=use_gpu,
            **shared(backend),
        ).fit(frame)

    there, here = fit(True), fit(False)
    assert str(there.getHistory()[-1].keys()) == str(here.getHistory()[-1].keys())
    there_loss, here_loss = (model.getHistory()[-1]["train"]["loss"] for model in (there, here))
    assert there_loss == pytest.approx(here_loss, rel=1e-3)
    assert {parameter.device.type for parameter in there.getModel().parameters()} == {"cpu"}


@pytest.mark.parametrize(("size", "ahead"), [(1 << 20, True), (1 << 20, False), (1 << 10, True)])
def test_batches_that_are_copied_keep_their_order_their_values_and_their_type(size: int, ahead: bool) -> None:
    device = torch.device("cuda", 0)

    def batches() -> Iterator[dict[str, Any]]:
        for number in range(40):
            kind = RepeatedRow if number == 39 else dict
            yield kind(x=torch.full((size,), float(number)), text="kept")

    sums = []
    kinds = []
    for batch in ToDevice(device)(batches(), ahead=ahead):
        torch.cuda._sleep(10_000_000)  # the memory of an earlier batch must not be written before this one is read
        sums.append(batch["x"].sum())
        kinds.append(type(batch))
        assert batch["text"] == "kept"
        assert batch["x"].is_cuda
        del batch
    assert [one.item() / size for one in sums] == [float(number) for number in range(40)]
    assert kinds == [dict] * 39 + [RepeatedRow]


def test_what_a_thread_meets_ahead_is_raised_at_its_batch() -> None:
    def batches() -> Iterator[dict[str, Any]]:
        for number in range(3):
            yield {"x": torch.full((1 << 20,), float(number))}
        raise ValueError("a bad file")

    taken = []
    with pytest.raises(ValueError, match="a bad file"):
        taken += [batch["x"][0].item() for batch in ToDevice(torch.device("cuda", 0))(batches())]
    assert taken == []
    for batch in ToDevice(torch.device("cuda", 0))(batches()):
        taken.append(batch["x"][0].item())
        if len(taken) == 3:
            break
    assert taken == [0.0, 1.0, 2.0]
