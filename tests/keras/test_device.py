"""Which GPU a worker computes on; TensorFlow's devices are fakes."""

from __future__ import annotations

import keras
import pytest

from hvd_cluster.keras.device import use_own_gpu

tf = pytest.importorskip("tensorflow")


@pytest.mark.parametrize(("gpus", "chosen"), [(["first", "second"], ["second"]), ([], None)])
def test_a_worker_takes_the_gpu_of_its_place_and_none_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], chosen: list[str] | None
) -> None:
    made: dict[str, list[str]] = {}
    monkeypatch.setattr(keras.config, "backend", lambda: "tensorflow")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: gpus)
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda devices, kind: made.update({kind: devices}))
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", lambda device, on: None)
    use_own_gpu(1)
    assert made.get("GPU") == chosen
