from __future__ import annotations

import copy
import resource

import numpy as np
import pytest
import torch

from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.run.checkpoint import Checkpoint, PartialEpoch
from hvd_cluster.estimators.run.fingerprint import Fingerprint
from hvd_cluster.estimators.run.run_files import RunFiles
from hvd_cluster.estimators.torch.train_state import TrainState, unscaled_optimizer

ROWS = Fingerprint(["x"], ["y"], {"x": "list float32[4]", "y": "numeric float32"}, 100)


def checkpoint(model, optimizer, size, history, partial_epoch=None, scheduler=None):
    """Of a run of ``size`` workers with as many times the learning rate of one."""
    state = TrainState(model, optimizer, scheduler).capture(float(size), [0.1])
    return Checkpoint(state, history, size, ROWS, partial_epoch=partial_epoch)


def trained(lr):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_checkpoint_holds_the_rate_of_one_worker(tmp_path):
    store = Store.create(tmp_path)
    model, optimizer = trained(lr=np.float64(0.3))
    checkpoint(model, optimizer, 3, [{"epoch": 0}]).save(RunFiles(store, "run"))
    content = torch.load(store.get_checkpoint_path("run"), weights_only=True)
    assert content["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.1)
    assert torch.equal(content["model"]["weight"], model.weight)


@pytest.mark.parametrize("size", [3, 2])
def test_a_restored_run_has_the_state_and_the_rate_for_its_workers(tmp_path, size):
    store = Store.create(tmp_path)
    model, optimizer = trained(lr=0.7)
    checkpoint(model, optimizer, 3, [{"epoch": 0, "train": {"loss": float("nan")}}]).save(RunFiles(store, "run"))
    twin = torch.nn.Linear(2, 1)
    fresh = torch.optim.SGD(twin.parameters(), lr=99.0, momentum=0.9)
    found = Checkpoint.load(RunFiles(store, "run"))
    assert (found.epochs, found.history[0]["epoch"]) == (1, 0)
    TrainState(twin, fresh).restore(found, "run", size, float(size))
    assert torch.equal(twin.weight, model.weight)
    assert torch.equal(fresh.state[twin.weight]["momentum_buffer"], optimizer.state[model.weight]["momentum_buffer"])
    # With as many workers as before it is the very same rate, not one that was divided and multiplied again.
    assert fresh.param_groups[0]["lr"] == (0.7 if size == 3 else pytest.approx(0.7 / 3 * 2))


@pytest.mark.parametrize("size", [3, 2])
def test_a_rate_that_is_a_tensor_stays_one(size):
    def begun(lr):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        return model, torch.optim.Adam(model.parameters(), lr=torch.tensor(lr), foreach=False)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()

    model, optimizer = begun(0.7)
    step(model, optimizer)
    saved = Checkpoint.from_bytes(checkpoint(model, optimizer, 3, []).to_bytes(), "it")
    assert unscaled_optimizer(saved.state)["param_groups"][0]["lr"].item() == pytest.approx(0.7 / 3)
    twin, fresh = begun(99.0)
    rate = fresh.param_groups[0]["lr"]
    TrainState(twin, fresh).restore(saved, "run", size, float(size))
    assert fresh.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.7 / 3 * size)
    if size == 3:
        for _ in range(3):
            step(model, optimizer)
            step(twin, fresh)
        assert torch.equal(twin.weight, model.weight)


@pytest.mark.parametrize("other", [torch.optim.SGD, torch.optim.AdamW])
def test_a_checkpoint_of_another_class_of_optimizer_is_refused(tmp_path, other):
    files = RunFiles(Store.create(tmp_path), "run")
    model = torch.nn.Linear(2, 1)
    checkpoint(model, torch.optim.Adam(model.parameters()), 1, [{"epoch": 0}]).save(files)
    found = Checkpoint.load(files)
    twin = torch.nn.Linear(2, 1)
    with pytest.raises(DataError, match=rf"optimizer Adam, not {other.__name__}: choose another run_id"):
        TrainState(twin, other(twin.parameters(), lr=0.1)).restore(found, "run", 1, 1.0)


def warming_up(optimizer):
    schedulers = [
        torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7),
    ]
    return torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, milestones=[3])


def cycling(optimizer):
    return torch.optim.lr_scheduler.CyclicLR(optimizer, base_lr=0.01, max_lr=0.3, step_size_up=2)


def halving(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning")
@pytest.mark.filterwarnings(
    "ignore:The epoch parameter in `scheduler.step:UserWarning"
)  # torch's SequentialLR gives it
@pytest.mark.parametrize("make", [warming_up, cycling, halving])
def test_a_scheduler_continues_with_the_rates_of_as_many_workers_as_there_are(make):
    def begun(size):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * size)
        return model, optimizer, make(optimizer)

    def rates_of(scheduler, optimizer, steps):
        found = []
        for _ in range(steps):
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    model, optimizer, scheduler = begun(4)
    expected = rates_of(scheduler, optimizer, 9)[2:]
    model, optimizer, scheduler = begun(2)
    rates_of(scheduler, optimizer, 2)
    saved = checkpoint(model, optimizer, 2, [{}], scheduler=scheduler)
    model, optimizer, scheduler = begun(4)
    TrainState(model, optimizer, scheduler).restore(saved, "run", 4, 4.0)
    assert rates_of(scheduler, optimizer, 7) == pytest.approx(expected)


def ending_at_zero(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: max(0.0, 1 - epoch / 2))


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("make", [ending_at_zero, halving])
@pytest.mark.parametrize("size", [2, 4])
def test_a_schedule_that_has_ended_begins_from_the_rate_of_one_worker_again(make, size):
    def begun(size):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * size)
        return model, optimizer, make(optimizer)

    model, optimizer, scheduler = begun(2)
    for _ in range(2):
        scheduler.step()
    saved = Checkpoint.from_bytes(checkpoint(model, optimizer, 2, [{}], scheduler=scheduler).to_bytes(), "it")
    assert unscaled_optimizer(saved.state)["param_groups"][0]["initial_lr"] == pytest.approx(0.1)
    model, optimizer, scheduler = begun(size)
    TrainState(model, optimizer, scheduler).restore(saved, "run", size, float(size))
    assert scheduler.base_lrs == pytest.approx([0.1 * size])
    again = checkpoint(model, optimizer, size, [{}], scheduler=scheduler)
    assert unscaled_optimizer(again.state)["param_groups"][0]["initial_lr"] == pytest.approx(0.1)


def test_there_is_no_checkpoint_before_the_first_epoch(tmp_path):
    assert Checkpoint.load(RunFiles(Store.create(tmp_path), "run")) is None


def test_a_store_that_keeps_no_runs_gets_none(tmp_path):
    store = Store.create(tmp_path, save_runs=False)
    checkpoint(*trained(0.1), 1, []).save(RunFiles(store, "run"))
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_or_half_file_is_named_and_not_executed(tmp_path):
    store = Store.create(tmp_path)
    checkpoint(*trained(0.1), 1, []).save(RunFiles(store, "run"))
    path = store.get_checkpoint_path("run")
    store.write(path, store.read(path)[:-40])
    with pytest.raises(DataError, match=r"not a checkpoint of this run.*another run_id"):
        Checkpoint.load(RunFiles(store, "run"))


def test_taking_a_checkpoint_leaves_the_optimizer_alone():
    model, optimizer = trained(0.1)
    before = copy.deepcopy(optimizer.state_dict())
    checkpoint(model, optimizer, 2, [])
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]


@pytest.mark.parametrize(
    ("epochs", "running", "kept"),
    [
        (0, False, ""),
        (2, False, "; the checkpoint of epoch 2 is kept: run again with run_id='run'"),
        (2, True, "; the checkpoint within epoch 3 is kept: run again with run_id='run'"),
    ],
)
def test_a_store_that_fills_up_is_named_with_what_is_kept(tmp_path, epochs, running, kept):
    store = Store.create(tmp_path)
    partial = PartialEpoch(rows=8, ranks=[{}]) if running else None
    if epochs:
        history = [{"epoch": epoch} for epoch in range(epochs)]
        checkpoint(*trained(0.1), 1, history, partial).save(RunFiles(store, "run"))
    state = checkpoint(*trained(0.1), 1, [{"epoch": epoch} for epoch in range(6)])
    files = sorted(tmp_path.rglob("*"))
    before = [path.read_bytes() for path in files if path.is_file()]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(
            DataError, match=r"the store '.*run/checkpoint' cannot be written: File too large"
        ) as caught:
            state.save(RunFiles(store, "run"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(caught.value).partition("make this one writable")[2] == kept
    assert isinstance(caught.value.__cause__, OSError)
    assert [path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file()] == before


def test_a_checkpoint_knows_what_it_was_trained_on(tmp_path):
    store = Store.create(tmp_path)
    checkpoint(*trained(0.1), 1, []).save(RunFiles(store, "run"))
    found = Checkpoint.load(RunFiles(store, "run"))
    found.trained_on.require("run", ROWS)
    now = Fingerprint(["x", "a"], ["y"], {"x": "list float32[5]", "a": "numeric float64", "y": "numeric float32"}, 99)
    with pytest.raises(DataError) as caught:
        found.trained_on.require("run", now)
    for part in (
        "run_id='run' has a checkpoint of a fit on other data",
        "feature_cols were ['x'] and are ['x', 'a']",
        "column 'x' was list float32[4] and is list float32[5]",
        "column 'a' is new",
        "the data had 100 rows and has 99",
        "choose another run_id",
    ):
        assert part in str(caught.value)
