"""The folders of sharded checkpoints, in one process."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError
from hvd_cluster.estimators.torch.strategies.shards import Shards, shards_path

pytestmark = pytest.mark.needs("torch>=2.6")

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "step": torch.tensor(3), "half": torch.ones(2, dtype=torch.bfloat16)}


@pytest.fixture(params=["disk", "memory"])
def store(request, tmp_path):
    return Store.create(str(tmp_path) if request.param == "disk" else f"memory://{tmp_path.name}")


def written(store):
    shards = Shards(store, "run", "1-ab")
    with pytest.warns(UserWarning, match="assuming the intent is to save in a single process"):
        shards.write(TENSORS)
    return shards


def test_what_is_written_is_read(store):
    shards = written(store)
    assert shards.shapes() == {name: (one.shape, one.dtype) for name, one in TENSORS.items()}
    targets = {name: torch.zeros_like(one) for name, one in TENSORS.items()}
    shards.read(targets, alone=True)
    torch.testing.assert_close(targets, TENSORS, atol=0, rtol=0)


def test_a_missing_folder_is_not_a_checkpoint(store):
    with pytest.raises(DataError, match="is not a checkpoint of this run"):
        Shards(store, "run", "2-cd").shapes()


def test_a_missing_file_is_an_error(store):
    shards = written(store)
    folder = f"{shards_path(store, 'run')}/1-ab"
    store.delete(f"{folder}/__0_0.distcp")
    with pytest.raises(RuntimeError, match="cannot be read"):
        shards.read({"a": torch.zeros(2, 3)}, alone=True)


def test_metadata_of_pickled_values_is_refused(store):
    """torch would unpickle them."""
    shards = written(store)
    content = io.BytesIO()
    pickle.dump(Metadata({"a": BytesStorageMetadata()}), content)
    store.write(f"{shards_path(store, 'run')}/1-ab/.metadata", content.getvalue())
    with pytest.raises(DataError, match="it holds .*BytesStorageMetadata"):
        shards.shapes()
