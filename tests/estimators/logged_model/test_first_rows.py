"""The first rows of a fit's training data."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa

from hvd_cluster.data.materializing import materialize
from hvd_cluster.estimators.logged_model.first_rows import first_rows


def test_rows_have_the_shapes_that_the_user_gave_them(tmp_path):
    matrices = np.arange(120.0).reshape(20, 2, 3)
    frame = pd.DataFrame({"m": list(matrices), "text": ["a", None] * 10, "y": range(20)})
    dataset = materialize(frame, str(tmp_path), columns=["m", "text", "y"], raw=["text"])
    rows = first_rows(dataset, ["m", "text"])
    assert rows.column_names == ["m", "text"]
    assert rows["m"].type == pa.list_(pa.list_(pa.float64(), 3), 2)
    assert np.array_equal(np.array(rows["m"].to_pylist()), matrices[: len(rows)])
    assert rows["text"].to_pylist() == ["a", None] * 10
