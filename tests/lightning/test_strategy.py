"""``Trainer(strategy=HorovodStrategy())`` on two ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = 48


def data(rows: int = ROWS) -> Any:
    """x of shape (rows, 4), y of shape (rows, 1), the same on every rank."""
    import torch

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 4, generator=generator)
    return torch.utils.data.TensorDataset(x, (x @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]])).tanh())


def module(seed: int = 1, kind: str = "SGD", schedule: bool = False, batch_norm: bool = False) -> Any:
    """A LightningModule of one hidden layer that records what it sees."""
    import lightning.pytorch as pl
    import torch

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(seed)
            hidden = torch.nn.Linear(4, 8)
            norm = [torch.nn.BatchNorm1d(8)] if batch_norm else []
            self.layers = torch.nn.Sequential(hidden, *norm, torch.nn.Tanh(), torch.nn.Linear(8, 1))
            self.rates: list[float] = []
            self.norms: list[float] = []
            self.batches = 0

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            self.batches += 1
            loss = torch.nn.functional.mse_loss(self.layers(x), y)
            self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=False, batch_size=len(x))
            self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
            return loss

        def on_after_backward(self) -> None:
            self.norm = self.norm_of_gradients()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            # Of batches that are accumulated, what was there before is this rank's own.
            self.norms.append(self.norm)

        def norm_of_gradients(self) -> float:
            grads = [parameter.grad for parameter in self.parameters()]
            return float(torch.cat([grad.flatten() for grad in grads]).norm())

        def validation_step(self, batch: Any, index: int) -> None:
            x, y = batch
            self.log("val", torch.nn.functional.mse_loss(self.layers(x), y), sync_dist=True, batch_size=len(x))

        def configure_optimizers(self) -> Any:
            options = {"momentum": 0.9} if kind == "SGD" else {}
            optimizer = getattr(torch.optim, kind)(self.parameters(), lr=0.05, **options)
            if not schedule:
                return optimizer
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return Net()


def fitted(hvd: Any, *, whole: bool, net: Any = None, batch_size: int = 8, **options: Any) -> Any:
    """The module and the trainer after a fit: of this rank's half of each batch, or of whole batches alone."""
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader, DistributedSampler

    from hvd_cluster.lightning import HorovodStrategy

    net = module() if net is None else net
    trainer = pl.Trainer(
        **{
            "strategy": pl.strategies.SingleDeviceStrategy() if whole else HorovodStrategy(),
            "accelerator": "cpu",
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }
    )
    # Rank r takes rows r, r + 2, ...: half batches of both ranks are one whole batch in the order of the rows. The
    # sampler that Lightning injects would shuffle.
    shares = None if whole else DistributedSampler(data(), hvd.size(), hvd.rank(), shuffle=False)
    loader = DataLoader(data(), batch_size=2 * batch_size if whole else batch_size, sampler=shares)
    val = DataLoader(data(16), batch_size=16 if whole else 8)
    trainer.fit(net, loader, val)
    return net, trainer


def difference(a: Any, b: Any) -> float:
    return max(
        float((left - right).detach().abs().max()) for left, right in zip(a.parameters(), b.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "max_epochs": 3},
    ],
    ids=["plain", "accumulated", "clipped by norm", "clipped by value", "both"],
)
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_half_batches_on_two_ranks_equal_whole_batches_on_one(two: Any, kind: str, options: dict[str, Any]) -> None:
    def fn(hvd: Any) -> list[float]:
        ours, trainer = fitted(hvd, whole=False, net=module(kind=kind), **options)
        alone, reference = fitted(hvd, whole=True, net=module(kind=kind), **options)
        logged = [float(each.callback_metrics[name]) for each in (trainer, reference) for name in ("loss", "val")]
        # Of accumulated batches the first norm is this rank's own.
        every = options.get("accumulate_grad_batches", 1)
        norms = [abs(a - b) for a, b in zip(ours.norms, alone.norms, strict=True)][every - 1 :: every]
        return [difference(ours, alone), abs(logged[0] - logged[2]), abs(logged[1] - logged[3]), max(norms)]

    assert max(map(max, two(fn))) < 1e-5


def test_ranks_that_begin_apart_end_with_the_weights_of_rank_zero(two: Any) -> None:
    def fn(hvd: Any) -> float:
        ours, _ = fitted(hvd, whole=False, net=module(seed=5 + hvd.rank()))
        alone, _ = fitted(hvd, whole=True, net=module(seed=5))
        return difference(ours, alone)

    assert max(two(fn)) < 1e-5


def test_each_rank_gets_its_share_of_the_rows(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import lightning.pytorch as pl
        from torch.utils.data import DataLoader

        net = module()
        seen: list[float] = []
        net.on_train_batch_start = lambda batch, index: seen.extend(batch[0][:, 0].tolist())
        quiet = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = pl.Trainer(strategy="horovod", max_epochs=1, **quiet)
        trainer.fit(net, DataLoader(data(), batch_size=8, shuffle=True))
        every = sorted(hvd.allgather_object(seen)[0] + hvd.allgather_object(seen)[1])
        return [net.batches, every == sorted(data().tensors[0][:, 0].tolist())]

    assert two(fn) == [[3, True]] * 2


def test_the_name_horovod_is_enough_and_scales_the_rate_as_lightning_1_did(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import lightning.pytorch as pl

        import hvd_cluster.lightning

        trainer = pl.Trainer(strategy="horovod", accelerator="cpu", logger=False, enable_checkpointing=False)
        strategy = trainer.strategy
        return [
            isinstance(strategy, hvd_cluster.lightning.HorovodStrategy),
            trainer.world_size,
            trainer.global_rank,
            trainer.is_global_zero,
            trainer.num_nodes,
            strategy.scale_lr,
        ]

    assert two(fn) == [[True, 2, 0, True, 1, True], [True, 2, 1, False, 1, True]]


def test_a_scheduler_steers_the_optimizer_that_steps(two: Any) -> None:
    def fn(hvd: Any) -> Any:
        import warnings

        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*step\\(\\).*")
            net, trainer = fitted(hvd, whole=False, net=module(schedule=True))
        plain = trainer.lr_scheduler_configs[0].scheduler.optimizer is trainer.optimizers[0]
        return [net.rates, plain, type(trainer.optimizers[0]).__mro__[1].__name__]

    assert two(fn) == [[[0.05, 0.05, 0.025, 0.025, 0.0125, 0.0125], True, "Optimizer"]] * 2


def test_the_monitor_of_learning_rates_sees_one_optimizer(two: Any, tmp_path: Path) -> None:
    def fn(hvd: Any, folder: str) -> list[str]:
        import lightning.pytorch as pl

        monitor = pl.callbacks.LearningRateMonitor()
        logger = pl.loggers.CSVLogger(folder)
        fitted(hvd, whole=False, net=module(schedule=True), callbacks=[monitor], logger=logger, log_every_n_steps=1)
        return sorted(monitor.lrs)

    assert two(fn, str(tmp_path)) == [["lr-SGD"]] * 2


@pytest.mark.needs("torch>=2.6")
def test_bfloat16_is_reduced_too(two: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        found = []
        for precision in ("bf16-mixed", "bf16-true", "64-true"):
            ours, _ = fitted(hvd, whole=False, precision=precision)
            alone, _ = fitted(hvd, whole=True, precision=precision)
            found.append(difference(ours, alone))
        return found

    for mixed, half, double in two(fn):
        assert mixed < 0.02
        assert half < 0.05
        assert double < 1e-12


def test_gradients_may_travel_compressed_and_as_sums(two: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        from hvd_cluster.lightning import HorovodStrategy

        alone, _ = fitted(hvd, whole=True)
        manners = ({"compression": hvd.Compression.fp16}, {"gradient_predivide_factor": 2.0}, {"groups": 2})
        found = [difference(fitted(hvd, whole=False, strategy=HorovodStrategy(**each))[0], alone) for each in manners]
        summed, _ = fitted(hvd, whole=False, strategy=HorovodStrategy(op=hvd.Sum))
        return [*found, difference(summed, alone)]

    for half, divided, grouped, summed in two(fn):
        assert half < 1e-3
        assert divided < 1e-5
        assert grouped < 1e-5
        assert summed > 1e-2


def test_adasum_of_equal_changes_is_that_change(two: Any) -> None:
    def fn(hvd: Any) -> float:
        from hvd_cluster.lightning import HorovodStrategy

        alone, _ = fitted(hvd, whole=True)
        options = {"strategy": HorovodStrategy(op=hvd.Adasum), "use_distributed_sampler": False}
        return difference(fitted(hvd, whole=True, **options)[0], alone)

    assert all(apart < 1e-5 for apart in two(fn))


def test_batch_normalisation_sees_all_ranks_and_is_as_before_after_the_fit(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import torch

        ours, _ = fitted(hvd, whole=False, net=module(batch_norm=True), sync_batchnorm=True)
        alone, _ = fitted(hvd, whole=True, net=module(batch_norm=True))
        apart = difference(fitted(hvd, whole=False, net=module(batch_norm=True))[0], alone)
        norm = ours.layers[1]
        running = float((norm.running_var - alone.layers[1].running_var).abs().max())
        return [difference(ours, alone), running, apart, type(norm) is torch.nn.BatchNorm1d]

    for weights, running, apart, restored in two(fn):
        assert weights < 1e-5
        assert running < 1e-5
        assert apart > 1e-4
        assert restored


def test_rank_zero_writes_the_checkpoint_and_all_resume_from_it(two: Any, tmp_path: Path) -> None:
    def fn(hvd: Any, folder: str) -> list[Any]:
        import lightning.pytorch as pl
        from torch.utils.data import DataLoader

        from hvd_cluster.lightning import HorovodStrategy

        quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}

        def trainer(epochs: int, **options: Any) -> Any:
            return pl.Trainer(strategy=HorovodStrategy(), max_epochs=epochs, **quiet, **options)

        keep = pl.callbacks.ModelCheckpoint(folder, save_last=True)
        loader = DataLoader(data(), batch_size=8)
        trainer(2, callbacks=[keep]).fit(module(kind="Adam"), loader)
        resumed = module(seed=9, kind="Adam")
        path = f"{folder}/last.ckpt"
        trainer(4, enable_checkpointing=False).fit(resumed, loader, ckpt_path=path)
        straight = module(kind="Adam")
        trainer(4, enable_checkpointing=False).fit(straight, loader)
        import torch

        saved = torch.load(path, weights_only=False)
        state = saved["optimizer_states"][0]["state"]
        return [difference(resumed, straight), keep.best_model_path, sorted(state[0])]

    for distance, best, state in two(fn, str(tmp_path)):
        assert distance < 1e-6
        assert Path(best).exists()
        assert state == ["exp_avg", "exp_avg_sq", "step"]


def test_two_optimizers_of_manual_optimization(two: Any) -> None:
    def fn(hvd: Any) -> float:
        import lightning.pytorch as pl
        import torch

        class Game(pl.LightningModule):
            """Two nets, each with an optimizer; the second net's loss goes through the first as well."""

            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(3)
                self.automatic_optimization = False
                self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

            def training_step(self, batch: Any, index: int) -> None:
                x, y = batch
                one, two = self.optimizers()
                one.zero_grad()
                self.manual_backward((self.second(self.first(x)) - y).pow(2).mean())
                one.step()
                two.zero_grad()
                self.manual_backward((self.second(self.first(x).tanh()) - y).abs().mean())
                self.clip_gradients(two, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                two.step()

            def configure_optimizers(self) -> Any:
                sgd = torch.optim.SGD(self.first.parameters(), lr=0.05)
                return sgd, torch.optim.Adam(self.second.parameters(), lr=0.01)

        ours, _ = fitted(hvd, whole=False, net=Game(), limit_val_batches=0)
        alone, _ = fitted(hvd, whole=True, net=Game(), limit_val_batches=0)
        return difference(ours, alone)

    assert max(two(fn)) < 1e-5


@pytest.mark.parametrize("kind", ["some are shared", "all are shared"])
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_a_parameter_of_two_optimizers_is_reduced_once(two: Any, op: str, kind: str) -> None:
    def fn(hvd: Any, op: str, kind: str) -> list[float]:
        import lightning.pytorch as pl
        import torch

        from hvd_cluster.lightning import HorovodStrategy

        class Shared(pl.LightningModule):
            """Both optimizers have the trunk; each loss has a head of its own."""

            def __init__(self, rate: float) -> None:
                super().__init__()
                torch.manual_seed(3)
                self.automatic_optimization = False
                self.rate = rate
                self.trunk = torch.nn.Linear(4, 4)
                self.first, self.second = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)

            def training_step(self, batch: Any, index: int) -> None:
                x, y = batch
                for optimizer, head in zip(self.optimizers(), (self.first, self.second), strict=True):
                    self.zero_grad()
                    self.manual_backward((head(self.trunk(x).tanh()) - y).pow(2).mean())
                    optimizer.step()
                for scheduler in self.lr_schedulers():
                    scheduler.step()

            def configure_optimizers(self) -> Any:
                own = [self.trunk, self.first], [self.trunk, self.second]
                if kind == "all are shared":
                    own = [self.trunk, self.first, self.second], [self.second, self.trunk]
                held = [[parameter for layer in layers for parameter in layer.parameters()] for layers in own]
                made = [torch.optim.SGD(one, lr=self.rate, momentum=0.9) for one in held]
                return made, [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in made]

        strategy, rate = HorovodStrategy(op=getattr(hvd, op)), 0.01 if op == "Sum" else 0.02
        ours, trainer = fitted(hvd, whole=False, net=Shared(rate), limit_val_batches=0, strategy=strategy)
        alone, reference = fitted(hvd, whole=True, net=Shared(0.02), limit_val_batches=0)
        rates = [[one.param_groups[0]["lr"] for one in each.optimizers] for each in (trainer, reference)]
        return [difference(ours, alone), *(ours / alone * 0.02 / rate for ours, alone in zip(*rates, strict=True))]

    for weights, *rates in two(fn, op, kind):
        assert weights < 1e-5
        assert rates == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_manual_optimization_may_accumulate_several_passes(two: Any, op: str) -> None:
    def fn(hvd: Any) -> list[float]:
        import lightning.pytorch as pl
        import torch

        from hvd_cluster.lightning import HorovodStrategy

        seen: list[float] = []

        class Accumulating(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = False
                self.weight = torch.nn.Parameter(torch.zeros(1))
                self.other = torch.nn.Parameter(torch.zeros(1))

            def training_step(self, batch: Any, index: int) -> None:
                optimizers = self.optimizers()
                self.manual_backward((self.weight + (self.other if index == 1 else 0)).sum() * (hvd.rank() + 1))
                if index == 2:
                    seen.extend(p.grad.item() for p in self.parameters())
                    for optimizer in optimizers:
                        optimizer.step()
                    seen.extend(p.grad.item() for p in self.parameters())

            def configure_optimizers(self) -> Any:
                return [torch.optim.SGD([p], lr=1.0) for p in self.parameters()]

        options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        strategy = HorovodStrategy(op=getattr(hvd, op))
        trainer = pl.Trainer(strategy=strategy, max_epochs=1, enable_checkpointing=False, **options)
        trainer.fit(Accumulating(), torch.utils.data.DataLoader(torch.zeros(6), batch_size=1))
        return seen

    expected = [4.5, 1.5] if op == "Average" else [9.0, 3.0]
    assert two(fn) == [expected * 2] * 2


def test_a_torchmetrics_metric_counts_the_rows_of_all_ranks(two: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        import torch
        import torchmetrics

        net = module()
        net.add_module("error", torchmetrics.MeanSquaredError())
        net.add_module("values", torchmetrics.CatMetric())

        def validation_step(batch: Any, batch_idx: int) -> None:
            net.error.update(net.layers(batch[0]), batch[1])
            # As many as the rank's number and three more: sizes may differ.
            net.values.update(torch.arange(3.0 + hvd.rank()))
            net.log("val_error", net.error)

        net.validation_step = validation_step
        _, trainer = fitted(hvd, whole=False, net=net, max_epochs=1, num_sanity_val_steps=0)
        x, y = data(16).tensors
        with torch.no_grad():
            expected = float((net.layers(x) - y).pow(2).mean())
        return [abs(float(trainer.callback_metrics["val_error"]) - expected), len(net.values.compute())]

    for error, length in two(fn):
        assert error < 1e-6
        assert length == 7


def test_collectives_of_the_strategy(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import lightning.pytorch as pl
        import torch

        from hvd_cluster.lightning import HorovodStrategy

        strategy = pl.Trainer(strategy=HorovodStrategy(), accelerator="cpu", logger=False).strategy
        r = hvd.rank()
        mine = torch.tensor([1.0 + r], requires_grad=True)
        gathered = strategy.all_gather(mine, sync_grads=True)
        (gathered * torch.tensor([[1.0], [10.0]]) * (1 + r)).sum().backward()
        strategy.barrier("here")
        try:
            strategy.reduce(torch.ones(1), reduce_op="median")
        except ValueError as error:
            refused = "median" in str(error)
        return [
            [float(strategy.reduce(torch.tensor(2.0 * r), reduce_op=op)) for op in ("mean", "sum", "min", "max")],
            float(strategy.reduce(torch.tensor(1.0), reduce_op=torch.distributed.ReduceOp.SUM)),
            strategy.reduce("text"),
            [strategy.reduce_boolean_decision(value) for value in (True, bool(r), False)],
            [strategy.reduce_boolean_decision(value, all=False) for value in (True, bool(r), False)],
            strategy.broadcast({"rank": r}, src=1),
            gathered.tolist(),
            float(mine.grad),
            strategy.all_gather(torch.tensor(r)).tolist(),
            strategy.all_gather(torch.tensor([[1, 2], [3, r]]).t()).tolist(),
            strategy.reduce(torch.tensor([[1, 2], [3, r]]).t(), reduce_op="sum").tolist(),
            refused,
            torch.distributed.is_initialized(),
        ]

    # The gradient of rank r's number is the sum over both ranks' results: (1 + 2) * 10^r.
    shared = [[1.0, 2.0, 0.0, 2.0], 2.0, "text", [True, False, False], [True, True, False], {"rank": 1}]
    transposed = [[[[1, 3], [2, 0]], [[1, 3], [2, 1]]], [[2, 6], [4, 1]]]
    rest = [[0, 1], *transposed, True, False]
    assert two(fn) == [[*shared, [[1.0], [2.0]], gradient, *rest] for gradient in (3.0, 30.0)]


def test_an_optimizer_that_is_not_a_torch_optimizer_is_refused(two: Any) -> None:
    def fn(hvd: Any) -> bool:
        class Steps:
            def __init__(self) -> None:
                self.state: dict[Any, Any] = {}
                self.param_groups: list[Any] = []
                self.defaults: dict[Any, Any] = {}

            def step(self, closure: Any = None) -> None: ...
            def zero_grad(self) -> None: ...
            def state_dict(self) -> None: ...
            def load_state_dict(self, state: Any) -> None: ...

        net = module()
        net.configure_optimizers = lambda: Steps()
        try:
            fitted(hvd, whole=False, net=net)
        except ValueError as error:
            return "torch.optim.Optimizer" in str(error)
        return False

    assert two(fn) == [True, True]


def test_scale_lr_multiplies_the_rates_of_optimizers_and_schedulers(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import torch

        from hvd_cluster.lightning import HorovodStrategy

        rates = torch.optim.lr_scheduler

        def seen(scheduler: Any, size: int) -> list[float]:
            """The rates of the steps of a fit; ``size`` is by what the module itself multiplies them."""
            net = module()

            def configure_optimizers() -> Any:
                optimizer = torch.optim.SGD(net.parameters(), lr=0.05 * size)
                return [optimizer], [{"scheduler": scheduler(optimizer, size), "interval": "step"}]

            net.configure_optimizers = configure_optimizers
            fitted(hvd, whole=False, net=net, strategy=HorovodStrategy(scale_lr=size == 1))
            return [round(rate, 6) for rate in net.rates]

        schedulers = [
            lambda optimizer, size: rates.StepLR(optimizer, 2, gamma=0.5),
            lambda optimizer, size: rates.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
            lambda optimizer, size: rates.OneCycleLR(optimizer, 0.2 * size, total_steps=8),
            lambda optimizer, size: rates.CyclicLR(optimizer, 0.01 * size, 0.1 * size, step_size_up=2),
            lambda optimizer, size: rates.SequentialLR(
                optimizer, [rates.ConstantLR(optimizer, 0.5, 2), rates.LambdaLR(optimizer, lambda step: 1.0)], [3]
            ),
        ]
        return [seen(scheduler, 1) == seen(scheduler, 2) for scheduler in schedulers] + seen(schedulers[0], 1)[:3]

    assert two(fn) == [[True] * 5 + [0.1, 0.1, 0.05]] * 2


def test_ranks_begin_with_the_optimizer_state_of_rank_zero(two: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        import torch

        net = module()

        def configure_optimizers() -> Any:
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1 / (1 + hvd.rank()), momentum=0.9)
            for parameter in net.parameters():
                optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, float(hvd.rank()))
            return optimizer

        net.configure_optimizers = configure_optimizers
        fitted(hvd, whole=False, net=net)
        return [net.rates[0], float(sum(parameter.detach().sum() for parameter in net.parameters()))]

    first, second = two(fn)
    assert first == second
    assert first[0] == 0.1


def test_all_ranks_validate_with_the_running_means_of_rank_zero(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        import torch

        net, trainer = fitted(hvd, whole=False, net=module(batch_norm=True), max_epochs=1)
        x, y = data(16).tensors
        with torch.no_grad():
            own = torch.nn.functional.mse_loss(net.eval().layers(x), y)
        return [float(trainer.callback_metrics["val"]), float(own), net.layers[1].running_mean.tolist()]

    (logged, own, means), (same, other, others) = two(fn)
    assert means == others
    assert logged == same == pytest.approx(own) == pytest.approx(other)
