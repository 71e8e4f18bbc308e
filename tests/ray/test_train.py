"""hvd inside Ray Train and Ray Tune."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray_clusters import TestCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def training_loop() -> Callable[[dict[str, Any]], None]:
    """A function that is none of this module, which Ray's workers could not import."""

    def loop(config: dict[str, Any]) -> None:
        """Train a little, report each epoch with a checkpoint from rank 0; die once if ``config`` says so."""
        import os
        import tempfile
        from pathlib import Path

        import ray.train
        import torch

        import hvd_cluster.torch as hvd

        hvd.init()
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        start = 0
        if (found := ray.train.get_checkpoint()) is not None:
            with found.as_directory() as folder:
                saved = torch.load(Path(folder, "model.pt"))
            model.load_state_dict(saved["model"])
            start = saved["epoch"] + 1
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=config["lr"]))
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        x = torch.full((4, 2), float(hvd.rank() + 1))
        for epoch in range(start, 3):
            optimizer.zero_grad()
            loss = (model(x) ** 2).mean()
            loss.backward()
            optimizer.step()
            if "died" in config and epoch == 1 and hvd.rank() == 1 and not Path(config["died"]).exists():
                Path(config["died"]).touch()
                os._exit(1)
            mean = hvd.allreduce(loss.detach()).item()
            world = ray.train.get_context()
            metrics = {"epoch": epoch, "loss": mean, "ranks": [hvd.rank(), world.get_world_rank()], "size": hvd.size()}
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = None
                if hvd.rank() == 0:
                    torch.save({"model": model.state_dict(), "epoch": epoch}, Path(folder, "model.pt"))
                    checkpoint = ray.train.Checkpoint.from_directory(folder)
                ray.train.report(metrics, checkpoint=checkpoint)

    return loop


def test_a_ray_train_run_reports_metrics_and_checkpoints(ray_cluster: TestCluster, tmp_path: Path) -> None:
    import torch
    from ray.train import RunConfig, ScalingConfig

    from hvd_cluster.ray.train import HorovodTrainer

    def fit(name: str, **more: Any) -> Any:
        run_config = RunConfig(storage_path=str(tmp_path), name=name, **more.pop("run", {}))
        trainer = HorovodTrainer(
            training_loop(),
            train_loop_config={"lr": 0.01, **more},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=run_config,
        )
        return trainer.fit()

    def weights(result: Any) -> torch.Tensor:
        with result.checkpoint.as_directory() as folder:
            weight: torch.Tensor = torch.load(Path(folder, "model.pt"))["model"]["weight"]
        return weight

    on_interrupt = signal.getsignal(signal.SIGINT)
    undisturbed = fit("undisturbed")
    assert signal.getsignal(signal.SIGINT) is on_interrupt  # the next Ctrl-C is the program's own
    assert (undisturbed.metrics["epoch"], undisturbed.metrics["size"]) == (2, 2)
    assert undisturbed.metrics["ranks"][0] == undisturbed.metrics["ranks"][1]

    from ray.train import FailureConfig

    # A worker dies; Ray Train starts a new group of workers, which is a new world.
    disturbed = fit("disturbed", died=str(tmp_path / "died"), run={"failure_config": FailureConfig(max_failures=1)})
    assert (tmp_path / "died").exists()
    assert torch.equal(weights(disturbed), weights(undisturbed))
    assert disturbed.metrics["loss"] == undisturbed.metrics["loss"]


def trainable() -> Callable[[dict[str, Any]], None]:
    """Likewise."""

    def trial(config: dict[str, Any]) -> None:
        """A Tune trial whose workers are those of an executor in the trial's own placement group."""
        import ray.train
        from ray import tune

        from hvd_cluster.ray import RayExecutor

        def train(lr: float) -> None:
            import torch

            import hvd_cluster.torch as hvd
            from hvd_cluster.ray import ray_logger

            hvd.init()
            for step in range(3):
                total = hvd.allreduce(torch.tensor(lr * step), op=hvd.Sum)
                if hvd.rank() == 0:
                    ray_logger.log({"score": total.item(), "size": hvd.size()})

        report = tune.report if hasattr(tune, "report") else ray.train.report  # where it was before Ray 2.41
        with RayExecutor(RayExecutor.create_settings(timeout_s=100), num_workers=2, cpus_per_worker=0.5) as executor:
            executor.run(train, args=[config["lr"]], callbacks=[report])

    return trial


def test_several_trials_of_tune_have_an_executor_each(ray_cluster: TestCluster, tmp_path: Path) -> None:
    import ray.train
    from ray import tune

    run_config = getattr(tune, "RunConfig", ray.train.RunConfig)
    bundles = [{"CPU": 0.5}, {"CPU": 0.5}, {"CPU": 0.5}]
    tuner = tune.Tuner(
        tune.with_resources(trainable(), tune.PlacementGroupFactory(bundles)),
        param_space={"lr": tune.grid_search([1.0, 10.0])},
        tune_config=tune.TuneConfig(metric="score", mode="max"),
        run_config=run_config(storage_path=str(tmp_path), verbose=0),
    )
    results = tuner.fit()
    assert not results.errors
    assert sorted(result.metrics["score"] for result in results) == [4.0, 40.0]
    assert {result.metrics["size"] for result in results} == {2}


def test_a_loop_may_say_horovod(ray_cluster: TestCluster, tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig

    from hvd_cluster.ray.train import HorovodConfig, HorovodTrainer

    said = str(tmp_path)

    def loop() -> None:
        from pathlib import Path

        import horovod.torch as hvd
        import torch

        hvd.init()
        total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()
        Path(said, str(hvd.rank())).write_text(str(total))

    result = HorovodTrainer(
        loop,
        horovod_config=HorovodConfig(as_horovod=True),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path), name="horovod"),
    ).fit()
    assert result.error is None
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["3.0", "3.0"]


#: A program for the HorovodTrainer that Ray itself has: its own processes import horovod before any of ours runs.
RAYS_OWN = """
import json, subprocess, sys
import hvd_cluster.compat, ray
from hvd_cluster.ray import runtime_env

address, folder = sys.argv[1:]
ray.init(address=address, log_to_driver=False, logging_level="error", runtime_env=runtime_env())
from ray.train import RunConfig, ScalingConfig
from ray.train.horovod import HorovodTrainer

def loop(config):
    import horovod.torch as hvd, ray.train, torch
    hvd.init()
    total = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()
    place = (hvd.rank(), hvd.local_rank(), hvd.size())
    assert place == (ray.train.get_context().get_world_rank(), ray.train.get_context().get_local_rank(), 2)
    hvd.shutdown()
    ray.train.report({"total": total * config["factor"]})

result = HorovodTrainer(
    loop,
    train_loop_config={"factor": 10},
    # One node: Ray tells nodes apart by the names of their hosts here, and those of a test are on one host.
    scaling_config=ScalingConfig(
        num_workers=2, use_gpu=False, trainer_resources={"CPU": 0}, placement_strategy="STRICT_PACK"
    ),
    run_config=RunConfig(storage_path=folder, name="own"),
).fit()

@ray.remote(num_cpus=0)
def child():
    code = "import horovod.torch; print(horovod.__version__)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()

print(json.dumps([result.metrics["total"], str(result.error), ray.get(child.remote())]))
"""


def test_the_trainer_of_ray_itself_trains_where_its_runtime_env_answers_for_horovod(
    ray_cluster: TestCluster, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RAYS_OWN, ray_cluster.address, str(tmp_path)],
        env={**os.environ, "RAY_TRAIN_V2_ENABLED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [30.0, "None", "0.28.1"]
