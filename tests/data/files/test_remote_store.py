from __future__ import annotations

from pathlib import Path

import pytest

from hvd_cluster.data.files.store_families import DBFSLocalStore
from hvd_cluster.data.store import Store


@pytest.mark.parametrize(
    "store",
    [
        Store("/Volumes/main/default/work"),
        DBFSLocalStore("dbfs:/Volumes/main/default/work"),
        DBFSLocalStore("dbfs:/work"),
        Store("/tmp/elsewhere", runs_path="/Volumes/main/default/runs"),
    ],
    ids=["a volume", "a volume's URL", "DBFS", "runs in a volume"],
)
def test_what_frameworks_write_goes_through_a_folder_of_this_machine_on_databricks(store):
    # Files on these mounts are not appended to, nor changed in the middle, as TensorBoard and HDF5 do.
    with store.get_local_output_dir_fn("r")() as folder:
        assert not folder.startswith(("/dbfs/", "/Volumes/"))
        assert Path(folder).is_dir()
    assert not Path(folder).exists()


def test_a_local_store_gives_the_runs_own_folder(tmp_path):
    store = Store.create(tmp_path)
    with store.get_local_output_dir_fn("r")() as folder:
        assert folder == store.get_run_path("r")
    assert Path(folder).is_dir()
