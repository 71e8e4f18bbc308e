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


class Own(pl.LightningModule):
    """Its forward() takes what ``preprocess`` returns, and its training step the label too."""

    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(1, 3)

    def forward(self, scaled):
        return self.last(scaled)

    def training_step(self, batch, batch_idx):
        assert {name: column.dtype for name, column in batch.items()} == {"scaled": torch.float32, "k": torch.int64}
        return F.cross_entropy(self(batch["scaled"]), batch["k"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def test_forward_gets_no_label_and_a_label_may_be_a_feature(two_workers, caplog):
    frame = pd.DataFrame({"v": np.arange(64) / 64, "k": np.arange(64) % 3})
    fit = LightningEstimator(
        model=Own(),
        preprocess=lambda batch: {"scaled": batch["v"][:, None] + batch["k"][:, None]},
        feature_cols=["v", "k"],
        label_cols=["k"],
        output_kinds=["columns"],
        batch_size=8,
        epochs=1,
        verbose=0,
        backend=two_workers,
    )
    model = fit.fit(frame)
    assert "cannot be called" not in caplog.text
    scores = model.transform(frame)[[f"k__output_{element}" for element in range(3)]].to_numpy()
    with torch.no_grad():
        expected = model.getModel()(torch.from_numpy((frame["v"] + frame["k"]).to_numpy(np.float32))[:, None])
    assert np.allclose(scores, expected, atol=1e-6)


@pytest.fixture(scope="module")
def reviews():
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, 3)) if row % 9 else None for row in range(96)]
    return pd.DataFrame({"text": texts, "label": [float(text is not None and "good" in text) for text in texts]})


def plain():
    torch.manual_seed(0)
    net = Net()
    return {"model": net, "optimizer": torch.optim.Adam(net.parameters(), lr=0.05), "loss": F.mse_loss}


def test_bad_rows_of_the_validation_are_counted_apart(reviews, two_workers):
    frame = reviews.assign(held=reviews.index % 4 == 1)
    frame.loc[[16, 17, 21], "text"] = "unknown words"
    fit = LightningEstimator(
        **plain(),
        preprocess=tokens,
        on_error="skip",
        feature_cols=["text"],
        label_cols=["label"],
        validation="held",
        batch_size=8,
        epochs=1,
        verbose=0,
        backend=two_workers,
    )
    (record,) = fit.fit(frame).getHistory()
    assert (record["left_out_rows"], record["validation_left_out_rows"]) == (1, 2)


def positive(batch):
    if (batch["x"] < 0).any():
        raise ValueError("negative")
    return batch["x"][:, None].astype("float32")


def test_a_validation_counts_the_rows_after_a_batch_without_a_good_one(two_workers):
    frame = pd.DataFrame({"x": np.arange(32.0), "y": np.arange(32.0), "held": np.arange(32) % 2 == 1})
    frame.loc[[9, 13], "x"] = -1.0  # the second of four validation batches of rank 0
    net = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(net.weight)
    torch.nn.init.zeros_(net.bias)
    fit = LightningEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.0),
        loss=F.mse_loss,
        preprocess=positive,
        on_error="skip",
        feature_cols=["x"],
        label_cols=["y"],
        validation="held",
        batch_size=8,
        val_batch_size=2,
        epochs=1,
        verbose=0,
        backend=two_workers,
    )
    (record,) = fit.fit(frame).getHistory()
    good = frame[frame["held"] & (frame["x"] >= 0)]
    assert record["validation"]["loss"] == pytest.approx((good["y"] ** 2).mean())


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
    texts = reviews["text"].astype(object).where(reviews["text"].notna(), None)
    made = tokens({"text": texts.to_numpy()})
    with torch.no_grad():
        expected = model.getModel()(torch.from_numpy(made["input_ids"]), torch.from_numpy(made["scale"]).float())
    scores = model.transform(reviews)["label__output"].to_numpy(np.float32)
    assert np.array_equal(scores, expected["score"].flatten().numpy())
