"""Fits of models that each worker makes: what is sent, what is saved, and what the guard of the factory says."""

from __future__ import annotations

import gc
import os
import sys
import threading

import cloudpickle
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.parametrizations import spectral_norm

from hvd_cluster.errors import DataError, LaunchError, WorkerFailedError
from hvd_cluster.estimators import ModelFactory, TorchEstimator, TorchModel

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")


class Net(torch.nn.Module):
    """A wide layer, frozen if asked for, with dropout and a running mean behind it."""

    def __init__(self, width=8, freeze=False):
        super().__init__()
        self.base = torch.nn.Linear(4, width).requires_grad_(not freeze)
        self.norm = torch.nn.BatchNorm1d(width)
        self.last = torch.nn.Linear(width, 1)

    def forward(self, x):
        return self.last(F.dropout(self.norm(torch.tanh(self.base(x))), 0.1, self.training))


class Adapted(torch.nn.Module):
    """A frozen table of 16 bytes an entry, and layers of 24 bytes for each of ``hidden`` behind it."""

    def __init__(self, entries, hidden=8):
        super().__init__()
        self.base = torch.nn.Embedding(entries, 4).requires_grad_(False)
        self.first = torch.nn.Linear(4, hidden)
        self.last = torch.nn.Linear(hidden, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.first(self.base((x.abs() * 1000).long()).sum(1))))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.001)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.02)


def estimator(backend, model, **params):
    given = {
        "optimizer": adam,
        "loss": F.mse_loss,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 16,
        "epochs": 2,
        "random_seed": 5,
        "verbose": 0,
        **params,
    }
    return TorchEstimator(model=model, backend=backend, **given)


def fit(frame, backend, model, **params):
    return estimator(backend, model, **params).fit(frame)


def states_equal(left, right):
    left, right = left.getModel().state_dict(), right.getModel().state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def checkpoint(folder, run_id="r", name="checkpoint"):
    return torch.load(folder / "runs" / run_id / name, weights_only=True)


def test_a_fit_with_a_factory_gives_the_weights_of_a_fit_with_its_module(frame, two_workers):
    def seeded():
        torch.manual_seed(0)
        return Net()

    made = fit(frame, two_workers, seeded)
    module = seeded()
    given = fit(frame, two_workers, module, optimizer=adam(module))
    assert states_equal(made, given)
    assert given.getModelFactory() is None
    assert states_equal(fit(frame, two_workers, module), given)  # a function makes the optimizer of a module too


def test_a_frozen_base_is_neither_stored_nor_saved(frame, two_workers, tmp_path):
    params = {"store": tmp_path, "run_id": "r", "validation": 0.2, "return_best": True, "early_stopping": 2}
    model = fit(frame, two_workers, ModelFactory(Adapted, 2_000_000), **params)
    for name in ("checkpoint", "checkpoint.best"):
        assert (tmp_path / "runs" / "r" / name).stat().st_size < 100_000
        assert set(checkpoint(tmp_path, name=name)["model"]) == {
            "first.weight",
            "first.bias",
            "last.weight",
            "last.bias",
        }
    model.write().overwrite().save(tmp_path / "model")
    assert sum(path.stat().st_size for path in (tmp_path / "model").rglob("*") if path.is_file()) < 100_000
    loaded = TorchModel.load(tmp_path / "model")
    assert states_equal(loaded, model)
    assert "model_factory=ModelFactory(Adapted, 2000000)" in repr(loaded)
    assert loaded.transform(frame).equals(model.transform(frame))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_checkpoint_of_a_frozen_base_of_300_mb_with_an_adapter_of_1_mb_has_1_mb(frame, two_workers, tmp_path):
    factory = ModelFactory(Adapted, 20_000_000, hidden=42_000)
    fit(frame, two_workers, factory, optimizer=sgd, epochs=1, store=tmp_path, run_id="r")
    assert 1_000_000 < (tmp_path / "runs" / "r" / "checkpoint").stat().st_size < 1_100_000


@pytest.mark.parametrize(
    ("model", "count"), [(Adapted(100_000), 1), (ModelFactory(Adapted, 100_000), 0), (Adapted(5000), 0)]
)
def test_a_large_frozen_base_as_an_instance_names_the_factory_once(frame, one_worker, capsys, model, count):
    optimizer = adam(model) if isinstance(model, torch.nn.Module) else adam
    estimator(one_worker, model, optimizer=optimizer, epochs=1, verbose=1).fit(frame)
    assert capsys.readouterr().err.count("100% of its bytes are frozen") == count


@pytest.mark.parametrize("steps", [None, 2])
def test_a_resumed_run_ends_with_the_weights_of_an_undisturbed_one(frame, two_workers, tmp_path, steps):
    params = {"checkpoint_every_steps": steps, "validation": 0.2, "run_id": "r", "return_best": steps is None}
    factory = ModelFactory(Net, freeze=True)
    whole = fit(frame, two_workers, factory, store=tmp_path / "a", epochs=4, **params)
    fit(frame, two_workers, factory, store=tmp_path / "b", epochs=2, **params)
    assert "base.weight" not in checkpoint(tmp_path / "b")["model"]
    assert "norm.running_mean" in checkpoint(tmp_path / "b")["model"]
    resumed = fit(frame, two_workers, factory, store=tmp_path / "b", epochs=4, **params)
    assert states_equal(whole, resumed)
    assert [record["epoch"] for record in resumed.getHistory()] == [0, 1, 2, 3]


def test_a_run_is_not_resumed_with_another_base(frame, one_worker, tmp_path):
    params = {"store": tmp_path, "run_id": "r"}
    fit(frame, one_worker, ModelFactory(Net, freeze=True), **params)
    runs = one_worker.runs
    with pytest.raises(DataError, match=r"another model than the factory makes now: 'base.weight' .* has other values"):
        fit(frame, one_worker, ModelFactory(Net, freeze=True), **{**params, "random_seed": 6, "epochs": 3})
    with pytest.raises(DataError, match=r"'base.weight' is float32 \(9, 4\), and was float32 \(8, 4\)"):
        fit(frame, one_worker, ModelFactory(Net, 9, freeze=True), **params)
    assert one_worker.runs == runs


def test_a_moving_average_in_frozen_parameters_is_kept(frame, two_workers, tmp_path):
    class Averaged(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 1)
            self.average = torch.nn.Linear(4, 1).requires_grad_(False)

        def forward(self, x):
            if self.training:
                self.average.weight.data.mul_(0.9).add_(self.net.weight.data, alpha=0.1)
            return self.net(x)

    params = {"run_id": "r", "checkpoint_every_steps": 2}
    whole = fit(frame, two_workers, Averaged, store=tmp_path / "a", epochs=3, **params)
    fit(frame, two_workers, Averaged, store=tmp_path / "b", epochs=1, **params)
    assert "average.weight" in checkpoint(tmp_path / "b")["model"]
    assert states_equal(whole, fit(frame, two_workers, Averaged, store=tmp_path / "b", epochs=3, **params))


def lazy():
    return torch.nn.Sequential(
        torch.nn.LazyLinear(6), torch.nn.LazyBatchNorm1d(), torch.nn.Tanh(), torch.nn.LazyLinear(1)
    )


def on_meta():
    with torch.device("meta"):
        net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))
    net[0].requires_grad_(False)
    return net


def parametrized():
    return torch.nn.Sequential(spectral_norm(torch.nn.Linear(4, 6)), torch.nn.Tanh(), torch.nn.Linear(6, 1))


@pytest.mark.parametrize("factory", [lazy, on_meta, parametrized])
def test_modules_that_cannot_be_sent_are_made_on_the_workers(frame, two_workers, tmp_path, factory):
    whole = fit(frame, two_workers, factory, store=tmp_path / "a", run_id="r", epochs=3)
    assert whole.getHistory()[-1]["train"]["loss"] < whole.getHistory()[0]["train"]["loss"]
    fit(frame, two_workers, factory, store=tmp_path / "b", run_id="r", epochs=1)
    resumed = fit(frame, two_workers, factory, store=tmp_path / "b", run_id="r", epochs=3)
    assert states_equal(whole, resumed)
    resumed.write().overwrite().save(tmp_path / "model")
    assert TorchModel.load(tmp_path / "model").transform(frame).equals(whole.transform(frame))


def random_base():
    net = Net(freeze=True)
    torch.nn.init.constant_(net.base.weight, int.from_bytes(os.urandom(4), "big"))
    return net


def random_start():
    net = Net()
    torch.nn.init.constant_(net.base.weight, int.from_bytes(os.urandom(1), "big") / 256)
    return net


def test_a_factory_whose_frozen_part_differs_between_processes_is_refused(frame, two_workers):
    with pytest.raises(
        WorkerFailedError, match=r"rank 0: model: random_base does not always make the same model: 'base.weight'"
    ):
        fit(frame, two_workers, random_base)


def test_initial_weights_come_from_rank_0_where_the_factory_makes_random_ones(frame, two_workers):
    model = fit(frame, two_workers, random_start, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0))
    assert len(model.getModel().base.weight.unique()) == 1


def test_a_factory_that_does_not_work_is_refused_before_any_worker_starts(frame, one_worker):
    runs, lock = one_worker.runs, threading.Lock()

    def locked():
        return Net() if lock else None

    with pytest.raises(LaunchError, match="lock"):
        fit(frame, one_worker, locked)
    with pytest.raises(
        DataError, match="model: <lambda> must return a torch.nn.Module, and returned an object of type"
    ):
        fit(frame, one_worker, lambda: {"model": Net()})
    with pytest.raises(DataError, match=r"model: ModelFactory\(load, '/no/such'\) failed: FileNotFoundError"):
        fit(frame, one_worker, ModelFactory(np.load, "/no/such"))
    with pytest.raises(ValueError, match="give a torch.nn.Module, or a function that makes one"):
        fit(frame, one_worker, "net")
    assert one_worker.runs == runs


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (adam(Net()), "Net makes the parameters on each worker, so give a function that makes it"),
        (None, "Net makes the parameters on each worker, so give a function that makes it"),
        (torch.optim.Adam, "optimizer has the class Adam: give a function that makes it"),
        (lambda model: model, "<lambda> must return a torch.optim.Optimizer, not an object of type Net"),
        (lambda model: model.no_such, "<lambda> failed: AttributeError: 'Net' object has no attribute 'no_such'"),
        (lambda model: adam(torch.nn.Linear(1, 1)), "holds 2 parameters that are not those of the model"),
        (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS needs a closure"),
    ],
)
def test_an_optimizer_that_does_not_fit_a_factory_is_refused(frame, one_worker, optimizer, text):
    with pytest.raises(ValueError, match=text):
        fit(frame, one_worker, Net, optimizer=optimizer)


def test_what_the_driver_made_for_its_trial_takes_no_memory_while_the_workers_train(frame, two_workers):
    def count():
        gc.collect()
        return sum(type(one) is Net for one in gc.get_objects())

    before, found = count(), []
    fitted = fit(frame, two_workers, Net, driver_callbacks=[lambda record: found.append(count())])
    assert found == [before] * 2
    assert count() == before + 1
    del fitted
    assert count() == before


def test_an_estimator_with_a_factory_is_saved_and_forgets_what_it_made(frame, two_workers, tmp_path):
    first = estimator(two_workers, ModelFactory(Net, freeze=True))
    model = first.fit(frame)
    assert first._made is None
    first.write().overwrite().save(tmp_path / "estimator")
    again = TorchEstimator.load(tmp_path / "estimator").setBackend(two_workers)
    assert states_equal(again.fit(frame), model)
