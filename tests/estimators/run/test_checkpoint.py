from __future__ import annotations

from types import SimpleNamespace

import pytest

from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.run.checkpoint import Checkpoint, PartialEpoch
from hvd_cluster.estimators.run.fingerprint import Fingerprint
from hvd_cluster.estimators.run.run_files import RunFiles


@pytest.mark.parametrize(("passes", "steps"), [(1, 3), (2, 2), (4, 0)])
def test_another_number_of_ranks_begins_with_a_whole_group_of_passes(passes, steps):
    """48 rows were 6 batches of one rank."""
    spec = SimpleNamespace(batch_size=8, backward_passes_per_step=passes)
    assert PartialEpoch(48, [{}]).steps(spec, 2) == steps


def test_a_checkpoint_of_another_framework_is_refused(tmp_path):
    files = RunFiles(Store.create(tmp_path), "r")
    Checkpoint({"weights": []}, [], 1, Fingerprint(["x"], ["y"], {}, 9)).save(files)
    assert Checkpoint.load(files, "weights").state == {"weights": []}
    with pytest.raises(DataError, match="run_id='r' has a checkpoint of another framework's estimator: choose"):
        Checkpoint.load(files, "model")
