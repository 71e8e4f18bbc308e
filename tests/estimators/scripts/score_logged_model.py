"""Scores rows with the MLflow model at argv[1], where hvd_cluster cannot be imported; the files are in argv[2].

Run by a row of the matrix too, in an environment that has only mlflow, torch and the model's own packages.
"""

from __future__ import annotations

import sys
from pathlib import Path


class Absent:
    """An import hook: hvd_cluster is not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hvd_cluster":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def main() -> None:
    sys.meta_path.insert(0, Absent())
    import mlflow.pyfunc
    import pandas as pd

    model, folder = mlflow.pyfunc.load_model(sys.argv[1]), Path(sys.argv[2])
    found = model.predict(pd.read_pickle(folder / "rows.pkl"))
    pd.testing.assert_frame_equal(found, pd.read_pickle(folder / "scored.pkl"), check_exact=True)
    example = model.predict(model.input_example)
    pd.testing.assert_frame_equal(example, pd.read_pickle(folder / "scored_example.pkl"), check_exact=True)
    assert not any(name.partition(".")[0] == "hvd_cluster" for name in sys.modules)
    print("SAME", *found.columns)


if __name__ == "__main__":
    main()
