"""The rows that a model is tried on before a fit."""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pandas as pd
import pytest

from hvd_cluster.data.materializing import materialize
from hvd_cluster.data.preprocessing import Preprocess
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.spec import Inputs
from hvd_cluster.estimators.trial_rows import TrialRows


def numbers(batch, training):
    return {"n": np.array([[float(text) + training] for text in batch["text"]], np.float32)}


def trial_rows(folder, texts, **options):
    frame = pd.DataFrame({"text": texts, "y": np.arange(len(texts), dtype="float32")})
    dataset = materialize(frame, str(folder), columns=["text", "y"], raw=["text"])
    preprocess = Preprocess(fn=numbers, columns=("text",), **options)
    return TrialRows(dataset, 0, required=["y"], transformation_fn=None, preprocess=preprocess)


def inputs(made):
    given = {field.name: () for field in dataclasses.fields(Inputs) if field.default is dataclasses.MISSING}
    return Inputs(**{**given, "feature_cols": ("n",), "label_cols": ("y",), "made": made})


def test_the_data_is_read_once_for_training_scoring_and_the_signature(tmp_path):
    rows = trial_rows(tmp_path, list(map(str, range(50))))
    batch = rows.batch()
    shutil.rmtree(tmp_path)
    assert rows.batch() is batch
    assert batch["n"].flatten().tolist() == [number + 1 for number in range(8)]
    assert batch["y"].tolist() == list(range(8))
    assert rows.scored(inputs(("n",)))["n"].flatten().tolist() == list(range(8))
    assert rows.table(["text"]).to_pydict() == {"text": list(map(str, range(50)))}
    with pytest.raises(DataError, match="it returned 'n', but 'other' for the rows that the model was tried on"):
        rows.scored(inputs(("other",)))


def test_a_good_row_is_found_where_the_function_fails_on_the_first_ones(tmp_path):
    texts = ["bad"] * 20 + list(map(str, range(20)))
    rows = trial_rows(tmp_path, texts, on_error="skip")
    assert set(rows.batch()["n"].flatten().tolist()) == {1.0}
    assert rows.scored(inputs(("n",)))["n"].flatten().tolist() == list(range(20))
    assert rows.table(["text"])["text"].to_pylist() == texts
