"""Raw columns through ``preprocess`` into LightningModules and plain modules that Lightning trains."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from hvd_cluster.estimators import LightningEstimator

if find_spec("lightning") is None:
    pytest.skip("needs lightning", allow_module_level=True)

import lightning.pytorch as pl

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WORDS = ["good", "bad", "fine", "awful"]


def tokens(batch):
    ids = np.zeros((len(batch["text"]), 3), np.int64)
    for row, text in enumerate(batch["text"]):
        if text is not None:
            ids[row] = [WORDS.index(word) + 1 for word in text.split()]
    return {"input_ids": ids, "scale": np.full((len(ids), 1), 2.0)}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.last = torch.nn.Embedding(5, 8), torch.nn.Linear(8, 1)

    def forward(self, input_ids, scale):
        return {"score": self.last(scale * self.embedding(input_ids).mean(1))}


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()

    def forward(self, input_ids, scale):
        return self.net(input_ids, scale)

    def training_step(self, batch, batch_idx):
        assert sorted(batch) == ["input_ids", "label", "scale"]
        loss = F.mse_loss(self(batch["input_ids"], batch["scale"])["score"].flatten(), batch["label"])
        self.log("train_loss", loss, on_epoch=True, on_step=False, sync_dist=True, batch_size=len(batch["label"]))
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


@pytest.fixture(scope="module")
def reviews():
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, 3)) if row % 9 else None for row in range(96)]
    return pd.DataFrame({"text": texts, "label": [float(text is not None and "good" in text) for text in texts]})


def plain():
    torch.manual_seed(0)
    net = Net()
    return {"model": net, "optimizer": torch.optim.Adam(net.parameters(), lr=0.05), "loss": F.mse_loss}


@pytest.mark.parametrize("make", [plain, lambda: {"model": Module()}], ids=["a plain module", "a LightningModule"])
def test_a_module_learns_from_text_and_scores_it(reviews, two_workers, make):
    fit = LightningEstimator(
        **make(),
        preprocess=tokens,
        feature_cols=["text"],
        label_cols=["label"],
        batch_size=8,
        epochs=4,
        random_seed=5,
        verbose=0,
        backend=two_workers,
    )
    model = fit.fit(reviews)
    losses = [record["logged"]["train_loss"] for record in model.getHistory()]
    assert losses[-1] < 0.9 * losses[0]
    made = tokens({"text": reviews["text"].to_numpy()})
    with torch.no_grad():
        expected = model.getModel()(torch.from_numpy(made["input_ids"]), torch.from_numpy(made["scale"]).float())
    scores = model.transform(reviews)["label__output"].to_numpy(np.float32)
    assert np.array_equal(scores, expected["score"].flatten().numpy())
