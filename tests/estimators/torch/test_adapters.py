"""LoRA on a model of transformers: the base is read from a path, and only the adapter is stored."""

from __future__ import annotations

import sys

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import torch

from hvd_cluster.estimators import ModelFactory, TorchEstimator, TorchModel

transformers = pytest.importorskip("transformers", reason="needs transformers")
peft = pytest.importorskip("peft", reason="needs peft")

# peft 0.21 reads a property that transformers 5.24 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
cloudpickle.register_pickle_by_value(sys.modules[__name__])
WORDS = ["good", "bad", "fine", "awful", "nice", "poor"]


def tokens(batch):
    ids = np.array([[WORDS.index(word) + 1 for word in text.split()] for text in batch["text"]])
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


def with_adapter(path, rank=2):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    base = AutoModelForSequenceClassification.from_pretrained(path)
    return get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=rank, target_modules=["query", "value"]))


def adamw(model):
    return torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=0.01)


@pytest.fixture(scope="module")
def reviews():
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, 3)) for _ in range(96)]
    return pd.DataFrame({"text": texts, "label": [int("good" in text or "nice" in text) for text in texts]})


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The path of a BERT with random weights, 2 MB."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=5000,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=16,
    )
    path = tmp_path_factory.mktemp("models") / "base"
    transformers.BertForSequenceClassification(config).save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def estimator(backend, base, **params):
    given = {
        "model": ModelFactory(with_adapter, base),
        "optimizer": adamw,
        "feature_cols": ["text"],
        "label_cols": ["label"],
        "preprocess": tokens,
        "batch_size": 8,
        "random_seed": 1,
        "verbose": 0,
        "run_id": "r",
        **params,
    }
    return TorchEstimator(backend=backend, **given)


def logits(model, frame):
    return np.stack(model.setOutputKinds(["array"]).transform(frame)["label__output"])


def test_only_the_adapter_is_stored_saved_and_exported(reviews, base, two_workers, tmp_path):
    model = estimator(two_workers, base, epochs=3, store=tmp_path).fit(reviews)
    losses = [record["train"]["loss"] for record in model.getHistory()]
    assert losses[-1] < losses[0]
    assert (tmp_path / "runs" / "r" / "checkpoint").stat().st_size < 200_000
    saved = torch.load(tmp_path / "runs" / "r" / "checkpoint", weights_only=True)["model"]
    assert all("lora_" in name or "modules_to_save" in name for name in saved)

    adapter = tmp_path / "adapter"
    model.getModel().save_pretrained(adapter)
    assert (adapter / "adapter_model.safetensors").stat().st_size < 50_000
    assert peft.PeftConfig.from_pretrained(adapter).base_model_name_or_path == base
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(base)
    loaded = peft.PeftModel.from_pretrained(plain, adapter).eval()
    with torch.no_grad():
        batch = {name: torch.from_numpy(value) for name, value in tokens(reviews).items()}
        expected = loaded(**batch).logits.numpy()
    np.testing.assert_array_equal(logits(model, reviews), expected)

    model.write().overwrite().save(tmp_path / "model")
    assert sum(path.stat().st_size for path in (tmp_path / "model").rglob("*") if path.is_file()) < 300_000
    again = TorchModel.load(tmp_path / "model")
    np.testing.assert_array_equal(logits(again, reviews), expected)
    assert base in repr(again.getModelFactory())

    merged = again.setModel(again.getModel().merge_and_unload())  # the factory does not make this one: saved as a whole
    merged.write().overwrite().save(tmp_path / "merged")
    np.testing.assert_array_equal(logits(TorchModel.load(tmp_path / "merged"), reviews), logits(merged, reviews))


def test_an_adapter_resumes_with_the_weights_of_an_undisturbed_fit(reviews, base, two_workers, tmp_path):
    whole = estimator(two_workers, base, epochs=2, store=tmp_path / "a").fit(reviews)
    estimator(two_workers, base, epochs=1, store=tmp_path / "b").fit(reviews)
    resumed = estimator(two_workers, base, epochs=2, store=tmp_path / "b").fit(reviews)
    states = whole.getModel().state_dict(), resumed.getModel().state_dict()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
