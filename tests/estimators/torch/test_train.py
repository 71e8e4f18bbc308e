"""Training on real workers: what it computes, against loops written out here."""

from __future__ import annotations

import sys

import cloudpickle
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hvd_cluster.data.materializing import materialize
from hvd_cluster.data.reader import ParquetReader
from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError, WorkerFailedError
from hvd_cluster.estimators import DiLoCo, EarlyStopping, LocalBackend, LocalSGD, PowerSGD, TorchEstimator

# The workers cannot import a test module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Net(torch.nn.Module):
    """Two inputs, dropout if asked for."""

    def __init__(self, dropout=0.0, outputs=1):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(5, 8)
        self.dropout = torch.nn.Dropout(dropout)
        self.last = torch.nn.Linear(8, outputs)

    def forward(self, x, a):
        return self.last(self.dropout(torch.tanh(self.first(torch.cat([x, a.reshape(-1, 1)], dim=1)))))


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def adam(net):
    return torch.optim.Adam(net.parameters(), lr=0.01)


def fit(frame, backend, net=None, optimizer=sgd, **params):
    net = net or Net()
    given = {
        "loss": F.mse_loss,
        "feature_cols": ["x", "a"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 3,
        "scale_lr": False,
        "random_seed": 5,
        "verbose": 0,
        **params,
    }
    return TorchEstimator(model=net, optimizer=optimizer(net), backend=backend, **given).fit(frame)


def difference(left, right):
    pairs = zip(left.getModel().parameters(), right.getModel().parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def sums_of_shares(model):
    """What the shares of each epoch and rank add up to."""
    return [sum(shares.values()) for record in model.getHistory() for shares in record["time_share"]]


def global_batches(frame, tmp_path, rows, epoch, remainder="pad"):
    """The batches of all ranks together, as one reader yields them."""
    data = materialize(frame, Store.create(tmp_path), columns=["x", "a", "y", "w"], num_proc=1, seed=5)
    reader = ParquetReader(
        data.train, data.schema, data.store, batch_size=rows, seed=5, shuffle=True, remainder=remainder
    )
    yield from reader.epoch(epoch)
    data.remove()


@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_two_workers_reach_the_weights_of_one_on_the_same_global_batches(frame, one_worker, two_workers, optimizer):
    two = fit(frame, two_workers, optimizer=optimizer, batch_size=8)
    one = fit(frame, one_worker, optimizer=optimizer, batch_size=16)
    assert difference(one, two) < 1e-5
    assert two.getHistory()[-1]["train"]["loss"] == pytest.approx(one.getHistory()[-1]["train"]["loss"], rel=1e-5)


def test_two_workers_reach_the_weights_of_a_plain_loop(frame, two_workers, tmp_path):
    fitted = fit(frame, two_workers, batch_size=8)
    net = Net()
    optimizer = sgd(net)
    losses = []
    for epoch in range(3):
        losses.append([])
        for batch in global_batches(frame, tmp_path, 16, epoch):
            optimizer.zero_grad()
            output = net(batch["x"], batch["a"].float())
            loss = F.mse_loss(output.flatten(), batch["y"])
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    for name, value in fitted.getModel().state_dict().items():
        torch.testing.assert_close(value, net.state_dict()[name], atol=1e-5, rtol=0)
    history = fitted.getHistory()
    assert [record["train"]["loss"] for record in history] == pytest.approx(
        [np.mean(each) for each in losses], rel=1e-5
    )
    assert [record["padding_rows"] for record in history] == [13 * 16 - 203] * 3
    assert len(history[0]["samples_per_s"]) == len(history[0]["data_wait_share"]) == 2


def test_accumulated_gradients_are_the_mean_of_the_group(frame, two_workers, one_worker):
    grouped = fit(frame, two_workers, batch_size=4, backward_passes_per_step=2, train_steps_per_epoch=24)
    # Rank r of R takes the rows whose position is r mod R, so two steps of 2 x 4 rows are one step of 16.
    whole = fit(frame, one_worker, batch_size=16, train_steps_per_epoch=12)
    assert difference(grouped, whole) < 1e-5


def test_the_last_group_of_an_epoch_may_be_short(frame, two_workers):
    model = fit(frame, two_workers, batch_size=8, backward_passes_per_step=3, epochs=2)
    assert np.isfinite(model.getHistory()[-1]["train"]["loss"])


def test_the_learning_rate_is_multiplied_by_the_number_of_workers(frame, two_workers, tmp_path):
    scaled = fit(frame, two_workers, scale_lr=True, store=tmp_path, run_id="scaled")
    by_hand = fit(
        frame,
        two_workers,
        optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    )
    assert difference(scaled, by_hand) < 1e-6
    saved = torch.load(tmp_path / "runs" / "scaled" / "checkpoint", weights_only=True)
    assert saved["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.05)
    assert scaled.getOptimizer().param_groups[0]["lr"] == pytest.approx(0.05)


def test_a_scheduler_begins_from_the_multiplied_rate_also_where_the_optimizer_had_one_before(frame, two_workers):
    def used(net):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # leaves initial_lr in the optimizer
        return optimizer

    constant = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)  # noqa: E731
    fresh = fit(frame, two_workers, scale_lr=True, lr_scheduler=constant)
    again = fit(frame, two_workers, scale_lr=True, lr_scheduler=constant, optimizer=used)
    assert difference(fresh, again) == 0
    for model in (fresh, again):
        assert model.getOptimizer().param_groups[0]["initial_lr"] == pytest.approx(0.05)


def test_a_resumed_run_ends_with_the_weights_of_an_undisturbed_one(frame, two_workers, tmp_path):
    kept = {"net": None, "scale_lr": True, "validation": 0.2, "random_seed": None}
    whole = fit(frame, two_workers, **{**kept, "net": Net(0.3)}, epochs=4, store=tmp_path / "a", run_id="r")
    fit(frame, two_workers, **{**kept, "net": Net(0.3)}, epochs=2, store=tmp_path / "b", run_id="r")
    resumed = fit(frame, two_workers, **{**kept, "net": Net(0.3)}, epochs=4, store=tmp_path / "b", run_id="r")
    assert difference(whole, resumed) == 0.0
    assert [record["epoch"] for record in resumed.getHistory()] == [0, 1, 2, 3]
    assert sums_of_shares(resumed) == pytest.approx([1.0] * 8)
    losses = [[record["validation"]["loss"] for record in model.getHistory()] for model in (whole, resumed)]
    assert losses[0] == losses[1]
    # Nothing is left to do: the model is that of the checkpoint.
    again = fit(frame, two_workers, **{**kept, "net": Net(0.3)}, epochs=4, store=tmp_path / "b", run_id="r")
    assert difference(again, resumed) == 0.0


def num_steps(output, label):
    """A metric: how many steps the clock has counted."""
    from hvd_cluster.monitor.step_clock import step_clock  # not a copy of it

    return torch.tensor(float(step_clock.num_steps))


@pytest.mark.parametrize(
    "params",
    [
        {},
        *(
            pytest.param(params, marks=pytest.mark.needs("torch>=2.6"))
            for params in (
                {"torch_backend": "hvd"},
                {"sharding": "zero1"},
                {"sharding": "fsdp2"},
                {"communication": PowerSGD(rank=2, start_step=2)},
                {"communication": LocalSGD(every=4)},
                {"communication": DiLoCo(every=4)},
            )
        ),
    ],
    ids=lambda params: str([*params.values()]),
)
def test_each_update_is_one_step_however_the_workers_exchange(frame, two_workers, params):
    model = fit(frame, two_workers, epochs=2, metrics={"steps": num_steps}, **params)
    assert sums_of_shares(model) == pytest.approx([1.0] * 4)
    # The count after each of the 13 updates of an epoch.
    means = [record["train"]["all_metrics"][0]["steps"] for record in model.getHistory()]
    assert means == [7.0, 20.0]


def test_a_checkpoint_of_another_model_is_refused(frame, one_worker, tmp_path):
    fit(frame, one_worker, epochs=1, store=tmp_path, run_id="r")
    runs = one_worker.runs
    with pytest.raises(DataError, match="run_id='r' has a checkpoint of another model or optimizer"):
        fit(frame, one_worker, net=torch.nn.Linear(4, 1), feature_cols=["x"], epochs=2, store=tmp_path, run_id="r")
    assert one_worker.runs == runs


def test_a_fit_says_that_it_continues_with_a_run(frame, one_worker, tmp_path, caplog):
    for epochs in (1, 3, 3):
        fit(frame, one_worker, epochs=epochs, store=tmp_path, run_id="r")
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert messages[0] == "run 'r' resumes after epoch 1 of 3"
    assert messages[1].startswith("run 'r' has finished 3 of 3 epochs and has nothing left to train")
    assert len(messages) == 2


def test_a_fit_with_another_learning_rate_says_that_the_run_keeps_its_own(frame, one_worker, tmp_path, caplog):
    def slow(net):
        return torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)

    fit(frame, one_worker, epochs=1, store=tmp_path, run_id="r")
    for epochs in (2, 3):  # the second one is still of the run that began with 0.05
        caplog.clear()
        fit(frame, one_worker, optimizer=slow, epochs=epochs, store=tmp_path, run_id="r")
        assert "the learning rate that it began with, 0.05: the optimizer's lr=0.001 has no effect" in caplog.text
    caplog.clear()
    fit(frame, one_worker, epochs=4, store=tmp_path, run_id="r")
    assert "learning rate" not in caplog.text


def test_a_run_keeps_its_rates_and_what_they_are_of_one_worker_where_scale_lr_is_another(
    frame, two_workers, tmp_path, caplog
):
    given = {"store": tmp_path, "run_id": "r"}
    fit(frame, two_workers, epochs=1, scale_lr=True, **given)
    resumed = fit(frame, two_workers, epochs=2, scale_lr=False, **given)
    assert "rates 2 times those of one worker, as it began: scale_lr=False has no effect" in caplog.text
    straight = fit(frame, two_workers, epochs=2, scale_lr=True, store=tmp_path, run_id="straight")
    assert difference(resumed, straight) == 0
    saved = torch.load(tmp_path / "runs" / "r" / "checkpoint", weights_only=True)
    assert saved["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.05)
    assert saved["scale"] == 2.0
    assert resumed.getOptimizer().param_groups[0]["lr"] == pytest.approx(0.05)
    caplog.clear()
    fit(frame, two_workers, epochs=3, scale_lr=True, **given)
    assert "scale_lr" not in caplog.text


def test_a_run_on_other_rows_or_columns_is_refused(frame, one_worker, tmp_path):
    fit(frame, one_worker, epochs=1, store=tmp_path, run_id="r")
    runs = one_worker.runs
    with pytest.raises(DataError, match=r"run_id='r' has .* other data \(the data had 203 rows and has 100\): choose"):
        fit(frame[:100], one_worker, epochs=2, store=tmp_path, run_id="r")
    with pytest.raises(DataError, match="label_cols were .* and are "):
        fit(frame, one_worker, label_cols=["w"], epochs=2, store=tmp_path, run_id="r")
    assert one_worker.runs == runs
    # The same rows may be shared out otherwise.
    fit(frame, one_worker, epochs=2, store=tmp_path, run_id="r", validation=0.2)


def test_a_failed_run_says_how_to_continue(frame, tmp_path):
    def full_disk(record, model):
        import resource

        if record["epoch"] == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    with pytest.raises(WorkerFailedError) as caught:
        fit(frame, LocalBackend(1, verbose=0), callbacks=[full_disk], store=tmp_path, run_id="r")
    text = str(caught.value)
    assert "cannot be written: File too large" in text
    assert "the checkpoint of epoch 2 is kept: run again with run_id='r'" in text
    last = "Run 'r' has a checkpoint of epoch 2 of 3: fit again with run_id='r' to resume from it."
    assert text.splitlines()[-1] == last
    assert isinstance(caught.value.__cause__, DataError)


def test_a_failed_run_without_a_checkpoint_says_nothing_of_one(frame, one_worker, tmp_path):
    def broken(record, model):
        raise KeyError("the user's mistake")

    with pytest.raises(WorkerFailedError) as caught:
        fit(frame, one_worker, callbacks=[broken])  # its store goes with it
    assert "fit again" not in str(caught.value)


class Normed(Net):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, x, a):
        return self.last(self.norm(torch.tanh(self.first(torch.cat([x, a.reshape(-1, 1)], dim=1)))))


def test_the_model_that_is_validated_is_the_one_that_is_returned(frame, two_workers):
    model = fit(frame, two_workers, net=Normed(), validation="v")
    rows = frame[frame["v"]]
    output = model.transform(rows)["y__output"].to_numpy().astype("float64")
    assert model.getHistory()[-1]["validation"]["loss"] == pytest.approx(np.mean((output - rows["y"]) ** 2), rel=1e-6)


def test_validation_counts_every_row_once(frame, two_workers):
    def error(output, label):
        return (output - label).abs().mean()

    model = fit(frame, two_workers, validation="v", metrics=[error], val_batch_size=5)
    rows = frame[frame["v"]]
    output = model.transform(rows)["y__output"].to_numpy()
    found = model.getHistory()[-1]["validation"]
    assert found["loss"] == pytest.approx(np.mean((output - rows["y"]) ** 2), rel=1e-4)
    assert found["all_metrics"] == [{"group_0_y": pytest.approx(np.mean(np.abs(output - rows["y"])), rel=1e-4)}]


@pytest.mark.parametrize("rows", [1, 2, 7, 47])
def test_ranks_with_few_or_no_validation_rows_make_the_same_steps_and_count_each_row_once(frame, three_workers, rows):
    def error(output, label):
        import hvd_cluster.torch as hvd

        if hvd.is_initialized():  # not where the model is tried
            hvd.allreduce(torch.ones(1))  # a rank that made fewer steps would be missed here
        return (output - label).abs().mean()

    marked = frame.assign(v=np.arange(len(frame)) < rows)
    model = fit(marked, three_workers, validation="v", metrics=[error], val_batch_size=3, epochs=1)
    held_out = marked[marked["v"]]
    output = model.transform(held_out)["y__output"].to_numpy().astype("float64")
    found = model.getHistory()[-1]["validation"]
    assert found["loss"] == pytest.approx(np.mean((output - held_out["y"]) ** 2), rel=1e-6)
    assert found["all_metrics"][0]["group_0_y"] == pytest.approx(np.mean(np.abs(output - held_out["y"])), rel=1e-6)


def test_an_epoch_that_resumes_on_another_number_of_ranks_weighs_its_rows_once(
    frame, two_workers, three_workers, tmp_path
):
    class Ends:
        """One for each batch, but for the seventh."""

        steps = 0

        def __call__(self, output, label):
            import hvd_cluster.torch as hvd

            self.steps += hvd.is_initialized()
            if self.steps == 7:
                raise RuntimeError("ended here")
            return torch.ones(())

    given = {"store": str(tmp_path), "run_id": "one", "checkpoint_every_steps": 5, "max_restarts": 0, "epochs": 1}
    with pytest.raises(WorkerFailedError, match="ended here"):
        fit(frame, two_workers, metrics=[Ends()], **given)

    def zero(output, label):
        return torch.zeros(())

    # 80 rows were saved; three ranks resume after 72 of them, and make 6 steps of 24 rows.
    model = fit(frame, three_workers, metrics=[zero], **given)
    assert model.getHistory()[0]["train"]["all_metrics"] == [{"group_0_y": pytest.approx(72 / 216)}]


def test_row_weights_count_in_the_loss(frame, two_workers, tmp_path):
    fitted = fit(frame, two_workers, sample_weight_col="w", epochs=1)
    net = Net()
    optimizer = sgd(net)
    for batch in global_batches(frame, tmp_path, 16, 0):
        optimizer.zero_grad()
        output = net(batch["x"], batch["a"].float()).flatten()
        ((output - batch["y"]) ** 2 * batch["w"].float()).mean().backward()
        optimizer.step()
    for name, value in fitted.getModel().state_dict().items():
        torch.testing.assert_close(value, net.state_dict()[name], atol=1e-5, rtol=0)


class TwoHeads(Net):
    def forward(self, x, a):
        hidden = torch.tanh(self.first(torch.cat([x.reshape(len(x), 4), a], dim=1)))
        return self.last(hidden)[:, :1], self.last(hidden)[:, 1:]


def test_a_metric_has_the_name_that_it_was_given(frame, one_worker, tmp_path):
    def both(**params):
        net = TwoHeads(outputs=2)
        given = {"label_cols": ["y", "w"], "input_shapes": [[-1, 4], [-1, 1]], "validation": 0.2, "epochs": 1, **params}
        return fit(frame, one_worker, net=net, **given).getHistory()[0]

    named = both(metrics={"error": F.l1_loss, "mixed": [F.mse_loss, F.l1_loss]})
    listed = both(metrics=[F.l1_loss, [F.mse_loss, F.l1_loss]])
    for part in ("train", "validation"):
        values = [list(group.values()) for group in listed[part]["all_metrics"]]
        assert [list(group) for group in named[part]["all_metrics"]] == [["error_y", "error_w"], ["mixed_y", "mixed_w"]]
        assert [list(group.values()) for group in named[part]["all_metrics"]] == values
    net = Net()
    given = {"feature_cols": ["x", "a"], "label_cols": ["y"], "loss": F.mse_loss, "validation": 0.2, "epochs": 1}
    unfitted = TorchEstimator(model=net, optimizer=sgd(net), metrics={"error": F.l1_loss}, verbose=0, **given)
    unfitted.save(str(tmp_path / "estimator"))
    loaded = TorchEstimator.load(str(tmp_path / "estimator")).setBackend(one_worker)
    loaded.setEarlyStopping(EarlyStopping(monitor="validation_error"))
    assert {"train_error", "validation_error"} < set(loaded.fit(frame).history.columns)
    with pytest.raises(ValueError, match="other than 'loss'"):
        unfitted.setMetrics({"loss": F.l1_loss})
    with pytest.raises(ValueError, match=r"metrics\['error'\] has 2 entries for 1 label columns"):
        unfitted.setMetrics({"error": [F.l1_loss] * 2}).setBackend(one_worker).fit(frame)


def test_several_inputs_outputs_losses_and_metrics(frame, two_workers):
    def accuracy(output, label):
        return (output.argmax(dim=1) == label).float().mean()

    def error(output, label):
        return (output - label).abs().mean()

    model = fit(
        frame,
        two_workers,
        net=TwoHeads(outputs=4),
        optimizer=adam,
        label_cols=["y", "c"],
        loss=[F.mse_loss, lambda output, label: F.cross_entropy(output, label.long())],
        loss_weights=[0.2, 0.8],
        input_shapes=[[-1, 2, 2], [-1, 1]],
        metrics=[[error, accuracy]],
        validation=0.2,
        epochs=12,
    )
    validation = model.getHistory()[-1]["validation"]
    assert validation["all_metrics"][0]["group_0_c"] > 0.6
    scored = model.transform(frame)
    assert scored["y__output"].dtype == np.float32
    assert len(scored["c__output"][0]) == 3
    guesses = np.argmax(np.stack(scored["c__output"]), axis=1)
    assert np.mean(guesses == frame["c"]) > 0.6


def test_a_step_of_the_users_own_is_called(frame, two_workers):
    def step(
        model,
        optimizer,
        transform_outputs,
        loss_fn,
        inputs,
        labels,
        sample_weights,
        backward_passes_per_step,
        batch_idx,
    ):
        assert backward_passes_per_step == 1
        assert isinstance(batch_idx, int)
        optimizer.zero_grad()
        outputs, labels = transform_outputs(model(*inputs), labels)
        loss = loss_fn(outputs, labels, sample_weights)
        loss.backward()
        optimizer.step()
        return outputs, loss

    assert difference(fit(frame, two_workers, train_minibatch_fn=step), fit(frame, two_workers)) == 0.0


def test_fewer_steps_an_epoch_continue_where_the_last_one_ended(frame, two_workers):
    # 203 rows in batches of 16 are 13 steps.
    halves = fit(frame, two_workers, epochs=2, train_steps_per_epoch=13)
    pieces = fit(frame, two_workers, epochs=13, train_steps_per_epoch=2)
    assert difference(halves, pieces) == 0.0


def test_loss_constructors_and_compression_work(frame, two_workers):
    import hvd_cluster.torch as hvd

    model = fit(
        frame,
        two_workers,
        loss=None,
        loss_constructors=lambda: torch.nn.MSELoss(),
        gradient_compression=hvd.Compression.fp16,
        epochs=4,
    )
    losses = [record["train"]["loss"] for record in model.getHistory()]
    assert losses[-1] < losses[0] / 2


def test_callbacks_see_every_epoch_on_every_rank(frame, two_workers, tmp_path):
    def note(record, model):
        import os

        name = f"{os.environ['RANK']}-{record['epoch']}-{record['train']['loss']:.6f}"
        (tmp_path / name).write_text(type(model).__name__)

    model = fit(frame, two_workers, callbacks=[note], epochs=2)
    losses = [f"{record['train']['loss']:.6f}" for record in model.getHistory()]
    expected = sorted(f"{rank}-{epoch}-{losses[epoch]}" for rank in (0, 1) for epoch in (0, 1))
    assert sorted(path.name for path in tmp_path.iterdir()) == expected


def test_string_columns_reach_the_model_through_the_users_transform(frame, two_workers):
    named = frame.assign(a=["high" if value > 0 else "low" for value in frame["a"]])

    def encode(row):
        return {**row, "a": 1.0 if row["a"] == "high" else -1.0}

    model = fit(named, two_workers, transformation_fn=encode, epochs=1)
    assert np.isfinite(model.getHistory()[0]["train"]["loss"])


class Named(Net):
    """Its outputs have names, of which one is that of the label."""

    def forward(self, x, a):
        hidden = torch.tanh(self.first(torch.cat([x, a.reshape(-1, 1)], dim=1)))
        return {"hidden": hidden, "y": self.last(hidden)}


def test_losses_go_to_the_outputs_of_their_labels_and_other_outputs_become_columns(frame, one_worker):
    trained = [fit(frame, one_worker, net, metrics={"mse": F.mse_loss}, epochs=1) for net in (Net(), Named())]
    assert difference(*trained) == 0.0
    assert trained[0].history["train_mse"].equals(trained[1].history["train_mse"])
    plain, named = (model.transform(frame) for model in trained)
    assert list(named)[-2:] == ["y__output", "hidden__output"]
    assert named["y__output"].equals(plain["y__output"])
    assert np.stack(named["hidden__output"]).shape == (len(frame), 8)


@pytest.mark.parametrize("workers", ["one_worker", "two_workers"])
def test_the_users_own_traceback_comes_first(frame, workers, request):
    def broken(output, label):
        if len(output) > 7:  # not on the few rows of the trial
            raise KeyError("the user's mistake")
        return F.mse_loss(output, label)

    with pytest.raises(WorkerFailedError) as caught:
        fit(frame, request.getfixturevalue(workers), loss=broken)
    text = str(caught.value)
    assert "the user's mistake" in text
    assert "tensorboard" not in text
    assert "in broken" in text.partition("Rank ")[0]


def test_ranks_with_different_devices_say_so_on_every_rank(two_workers):
    def choose():
        import os

        import torch

        import hvd_cluster.torch as hvd
        from hvd_cluster.estimators.run.world import choose_device

        original = torch.cuda.is_available, torch.cuda.device_count
        if os.environ["RANK"] == "0":
            torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 1)
        hvd.init()
        try:
            choose_device(True, hvd)
        except RuntimeError as error:
            return str(error), choose_device(False, hvd).type
        finally:
            torch.cuda.is_available, torch.cuda.device_count = original
            hvd.shutdown()

    for text, device in two_workers.run(choose):
        assert text.startswith("All ranks don't have same device type! (rank 0: cuda, rank 1: cpu)")
        assert device == "cpu"


def test_tensorboard_gets_scalars_where_it_is_installed(frame, one_worker, tmp_path, monkeypatch):
    code = (
        "class SummaryWriter:\n"
        "    def __init__(self, folder): import pathlib; self.p = pathlib.Path(folder); self.p.mkdir(parents=True)\n"
        "    def add_scalar(self, name, value, epoch):\n"
        "        (self.p / name.replace('/', '-')).write_text(f'{epoch} {value}')\n"
        "    def flush(self): pass\n"
        "    def close(self): pass\n"
    )

    def install(record, model):  # after the last epoch: the next fit of the same worker finds it
        import sys
        import types

        module = types.ModuleType("torch.utils.tensorboard")
        exec(code, module.__dict__)
        sys.modules["torch.utils.tensorboard"] = module

    def remove(record, model):
        import sys

        del sys.modules["torch.utils.tensorboard"]

    fit(frame, one_worker, epochs=1, callbacks=[install])
    model = fit(frame, one_worker, epochs=1, callbacks=[remove], store=tmp_path, run_id="r", validation=0.1)
    logs = tmp_path / "runs" / "r" / "logs"
    assert sorted(path.name for path in logs.iterdir()) == ["loss-train", "loss-validation"]
    assert (logs / "loss-train").read_text() == f"0 {model.getHistory()[0]['train']['loss']}"


class Spoiled(Net):
    """A running mean becomes infinite, while loss and parameters stay finite; a mask is infinite from the beginning."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("mask", torch.full((2,), -torch.inf))

    def forward(self, x, a):
        if self.training:
            self.mean += torch.inf
        return super().forward(x, a)


def test_a_buffer_that_becomes_infinite_ends_the_fit(frame, one_worker):
    with pytest.raises(WorkerFailedError, match="the weights are not finite, though the loss is, on rank 0"):
        fit(frame, one_worker, Spoiled(), epochs=1, max_restarts=0)
