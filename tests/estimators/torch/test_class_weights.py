from __future__ import annotations

import pytest
import torch

from hvd_cluster.estimators.torch.class_weights import ClassWeights


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_label_has_its_weight_in_every_dtype_of_the_model(dtype):
    labels = torch.tensor([[0.1], [0.9], [0.5]], dtype=torch.float64).to(dtype)
    found = ClassWeights({0.9: 3.0, 0.1: 2.0}).row_weights(labels, None)
    assert found.tolist() == [2.0, 3.0, 1.0]


def test_the_weights_of_rows_are_multiplied():
    found = ClassWeights({0: 2.0, 2: 3.0}).row_weights(torch.tensor([0, 1, 2]), torch.tensor([1.0, 0.5, 0.5]))
    assert found.tolist() == [2.0, 0.5, 1.5]
