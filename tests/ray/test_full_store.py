"""An object store that is really full: nothing is spilled to the disk, which has no room either."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from ray_clusters import await_nothing_left, ray_folder

from hvd_cluster.errors import LaunchError, WorkerFailedError
from hvd_cluster.ray import RayExecutor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STORE_BYTES = 80 * 2**20
#: More than the store has.
TOO_MUCH_BYTES = 150 * 2**20


@pytest.fixture(scope="module")
def small_store() -> Iterator[None]:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    with ray_folder():
        ray.init(
            address="local",
            num_cpus=4,
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            # Any disk is fuller than this, so none is used in place of memory.
            _system_config={"automatic_object_spilling_enabled": False, "local_fs_capacity_threshold": 0.0001},
        )
        yield
        ray.shutdown()


def test_what_finds_no_room_is_named_and_the_workers_continue(small_store: None) -> None:
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=100), num_workers=2)
    executor.start()
    pids = executor.run(os.getpid)
    with pytest.raises(WorkerFailedError, match="what the function returned found no room: the object store of a Ray"):
        executor.run(lambda: b"x" * TOO_MUCH_BYTES)
    with pytest.raises(LaunchError, match=r"the call with its arguments \(157 MB\) found no room: .*`ray memory`"):
        executor.run(len, args=[b"x" * TOO_MUCH_BYTES])
    assert executor.run(os.getpid) == pids
    executor.shutdown()
    assert await_nothing_left() == []


def test_an_elastic_job_says_the_same(small_store: None) -> None:
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=100), min_workers=1, max_workers=1)
    executor.start()
    with pytest.raises(LaunchError, match="what the function returned found no room"):
        executor.run(lambda: b"x" * TOO_MUCH_BYTES)
    with pytest.raises(LaunchError, match=r"the call with its arguments \(157 MB\) found no room"):
        executor.run(len, args=[b"x" * TOO_MUCH_BYTES])
    assert await_nothing_left() == []


def test_a_dataset_larger_than_the_store_streams_through_it_and_past_the_driver(
    small_store: None, tmp_path: Path
) -> None:
    """320 MB in blocks of 4 MB through a store of 80 MB: had they to be there together, the store would be full."""
    import ray
    import torch

    from hvd_cluster.estimators import TorchEstimator
    from hvd_cluster.estimators.ray.backend import RayBackend

    num_blocks, rows = 80, 64

    def widen(batch: dict) -> dict:  # type: ignore[type-arg]
        import numpy as np

        x = np.repeat(batch["id"].astype(np.float32)[:, None], 16384, axis=1) % 7  # 64 KB a row
        return {"x": x, "y": x[:, :1]}

    dataset = ray.data.range(num_blocks * rows, override_num_blocks=num_blocks).map_batches(widen, batch_size=None)
    model = torch.nn.Linear(16384, 1)
    estimator = TorchEstimator(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-6),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        input_shapes=[[-1, 16384]],
        batch_size=256,
        epochs=1,
        backend=RayBackend(1),
        store=str(tmp_path),
        verbose=0,
    )
    before_bytes = psutil.Process().memory_info().rss
    fitted = estimator.fit(dataset)
    grown_bytes = psutil.Process().memory_info().rss - before_bytes
    assert len(fitted.getHistory()) == 1
    assert grown_bytes < 0.5 * num_blocks * rows * 65536, f"{grown_bytes:,} bytes"
    assert await_nothing_left() == []
