"""Ray Serve with the class that scores batches, on a cluster of two nodes.

Not in the extra ``dev``: ``ray[serve]`` brings what Ray's dashboard needs, which leaves files behind in other tests.
"""

from __future__ import annotations

import sys
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from ray_clusters import TestCluster

from hvd_cluster.estimators import TorchModel

serve: Any = pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'ray[serve]'")
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def lengths(batch: dict[str, Any]) -> Any:
    return np.array([[len(text or "")] for text in batch["text"]], np.float32)


def test_the_replicas_of_a_deployment_score_as_transform_does(ray_cluster: TestCluster) -> None:
    torch.manual_seed(0)
    model = TorchModel(
        model=torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)),
        preprocess=lengths,
        feature_columns=["text"],
        label_columns=["y"],
        output_kinds=["array"],
    )
    frames = [pd.DataFrame({"id": range(n), "text": ["a" * (i % 5) or None for i in range(n)]}) for n in range(1, 9)]
    serve.start(proxy_location="Disabled")
    try:
        deployment = serve.deployment(model.predictor()).options(num_replicas=2)
        handle = serve.run(deployment.bind(), name="scores", route_prefix=None)
        answers = [handle.remote(frame) for frame in frames]  # at the same time
        for frame, answer in zip(frames, answers, strict=True):
            assert answer.result(timeout_s=60).equals(model.transform(frame))
        table = pa.Table.from_pandas(frames[-1])
        assert handle.remote(table).result(timeout_s=60).equals(model.transform(table))
        with pytest.raises(Exception, match="there is no column 'text'; did you mean 'texts'"):
            handle.remote(table.rename_columns(["id", "texts"])).result(timeout_s=60)
    finally:
        serve.shutdown()
