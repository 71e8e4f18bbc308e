from __future__ import annotations

from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F

from hvd_cluster.estimators.torch.objective import Objective, as_outputs


def test_losses_are_weighted_by_label():
    objective = Objective((F.mse_loss, F.l1_loss), (0.25, 0.75), None)
    outputs = [torch.tensor([[1.0], [3.0]]), torch.tensor([[0.0], [1.0]])]
    labels = [torch.tensor([0.0, 0.0]), torch.tensor([2.0, 2.0])]
    listed, shaped = objective.transform_outputs(tuple(outputs), labels)
    assert objective(listed, shaped).item() == 0.25 * 5.0 + 0.75 * 1.5


def test_row_weights_multiply_each_rows_loss_and_the_mean_divides_by_rows():
    output, label = torch.tensor([[1.0], [2.0], [3.0]]), torch.zeros(3, 1)
    weights = torch.tensor([1.0, 0.0, 1.0])
    for loss in (F.mse_loss, torch.nn.MSELoss()):
        assert Objective((loss,), (1.0,))([output], [label], weights).item() == pytest.approx(10 / 3)
    weighted = torch.nn.MSELoss()
    Objective((weighted,), (1.0,))([output], [label], weights)
    assert weighted.reduction == "mean"


def test_label_shapes_beat_the_outputs_shape():
    objective = Objective((F.mse_loss,), (1.0,), ((-1, 2),))
    _, shaped = objective.transform_outputs(torch.zeros(4), [torch.zeros(4)])
    assert shaped[0].shape == (2, 2)


def test_a_number_of_rows_in_label_shapes_stands_for_any():
    objective = Objective((F.mse_loss,), (1.0,), ((8, 1),))
    assert objective.transform_outputs(torch.zeros(5, 1), [torch.zeros(5)])[1][0].shape == (5, 1)


def test_class_labels_keep_their_shape():
    _, shaped = Objective((F.cross_entropy,), (1.0,)).transform_outputs(torch.zeros(4, 3), [torch.zeros(4)])
    assert shaped[0].shape == (4,)


def test_outputs_may_be_one_tensor_or_several():
    a, b = torch.zeros(1), torch.ones(1)
    assert as_outputs(a) == [a]
    assert as_outputs((a, b)) == [a, b]
    assert as_outputs({"first": a, "second": b}) == [a, b]


def test_outputs_are_in_the_order_of_the_label_columns_if_they_have_their_names():
    a, b = torch.zeros(1), torch.ones(1)
    pair = namedtuple("Pair", ["z", "y"])
    for outputs in ({"z": b, "y": a}, pair(b, a)):
        assert as_outputs(outputs, order=("y", "z")) == [a, b]
        assert as_outputs(outputs, order=("y",)) == [a, b]  # the rest is not for a label
        assert as_outputs(outputs, order=("y", "x")) == [b, a]
    assert as_outputs((a, b), order=("1", "0")) == [a, b]  # numbers are not names
