"""By which way a tensor of a GPU crosses: the same one on all ranks. (TensorFlow is told of GPUs; there are none.)"""

from __future__ import annotations

from typing import Any


def test_whether_all_gpus_are_seen_decides(two: Any) -> None:
    def fn(hvd: Any) -> list[set[bool]]:
        from unittest.mock import patch

        import tensorflow as tf

        from hvd_cluster.tensorflow import interop

        gpus = [f"/physical_device:GPU:{number}" for number in range(4)]

        def by_dlpack(seen: list[str], parts: int = 1) -> set[bool]:
            """Of a tensor on each GPU that this process sees, each of them divided in so many parts."""
            places = [f"/device:GPU:{number}" for number in range(parts * len(seen))]
            with patch.multiple(
                tf.config,
                list_physical_devices=lambda kind: gpus,
                get_visible_devices=lambda kind: seen,
                list_logical_devices=lambda kind: places,
            ):
                return {interop._has_torch_number(f"/job:localhost/task:0{place}") for place in places}

        ways = [by_dlpack(seen) for seen in ([gpus[hvd.rank()]], gpus, gpus[:3], gpus[::-1])]
        return [*ways, by_dlpack(gpus, parts=2), {interop._has_torch_number("/job:localhost/device:CPU:0")}]

    assert two(fn) == [[{False}, {True}, {False}, {False}, {False}, {True}]] * 2
