"""Which modules FSDP2 wraps."""

from __future__ import annotations

import pytest
from torch import nn

from hvd_cluster.estimators import FSDP2


def test_modules_are_chosen_by_size_and_inner_ones_first():
    model = nn.Sequential(nn.Linear(10, 10), nn.Sequential(nn.Linear(10, 100), nn.Linear(100, 10), nn.Linear(10, 10)))
    assert FSDP2(min_num_params=1000).wrapped(model) == ["1.0", "1.1"]
    assert FSDP2(min_num_params=200).wrapped(model) == ["1.0", "1.1"]
    assert FSDP2(min_num_params=100).wrapped(model) == ["0", "1.0", "1.1", "1.2"]
    assert FSDP2(min_num_params=2000).wrapped(model) == ["1"]
    assert FSDP2().wrapped(model) == []


def test_modules_are_chosen_by_class_or_its_name():
    model = nn.ModuleDict({"a": nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)]), "b": nn.Bilinear(2, 2, 2)})
    assert FSDP2(wrap=(nn.Linear, "LayerNorm")).wrapped(model) == ["a.0", "a.1"]
    assert FSDP2(wrap=nn.Bilinear).wrapped(model) == ["b"]
    assert FSDP2(wrap="ModuleDict").wrapped(model) == []


def test_a_class_that_the_model_lacks_is_named():
    with pytest.raises(ValueError, match=r"names Block, and the model has Linear, Sequential"):
        FSDP2(wrap=("Block",)).wrapped(nn.Sequential(nn.Linear(1, 1)))


def test_modules_that_share_a_weight_are_wrapped_together():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(50, 10)
            self.inner = nn.Linear(10, 10)
            self.head = nn.Linear(10, 50, bias=False)
            self.head.weight = self.tokens.weight

    assert FSDP2(min_num_params=100).wrapped(nn.Sequential(Net())) == ["0.inner", "0"]


def test_attention_is_not_divided():
    layer = nn.TransformerEncoderLayer(16, 2, 32)
    model = nn.Sequential(nn.MultiheadAttention(16, 2), layer)
    assert FSDP2(min_num_params=50).wrapped(model) == ["0", "1"]


@pytest.mark.parametrize("given", [{"wrap": (3,)}, {"min_num_params": 0}])
def test_wrong_values_are_refused(given):
    with pytest.raises(ValueError, match=f"FSDP2 with {next(iter(given))}="):
        FSDP2(**given)
