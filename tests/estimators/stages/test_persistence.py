from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hvd_cluster.data.store import Store
from hvd_cluster.errors import DataError
from hvd_cluster.estimators import LocalBackend, TorchEstimator, TorchModel
from hvd_cluster.estimators.stages import persistence
from hvd_cluster.estimators.stages.persistence import store_at

HERE = Path(__file__).parents[1]


def estimator():
    net = torch.nn.Linear(3, 1)
    return TorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        loss=F.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        input_shapes=[[-1, 3]],
        metrics=[lambda output, label: (output - label).abs().mean()],
        epochs=4,
        validation=0.25,
    )


def test_an_unfitted_estimator_is_loaded_with_all_its_params(tmp_path):
    saved = estimator()
    saved.save(str(tmp_path / "stage"))
    loaded = TorchEstimator.load(str(tmp_path / "stage"))
    assert loaded.uid == saved.uid
    assert (loaded.getEpochs(), loaded.getValidation(), loaded.getInputShapes()) == (4, 0.25, [[-1, 3]])
    assert loaded.isSet("epochs")
    assert not loaded.isSet("batch_size")
    assert torch.equal(loaded.getModel().weight, saved.getModel().weight)
    assert loaded.getLoss() is F.mse_loss
    assert loaded.getMetrics()[0](torch.ones(2), torch.zeros(2)).item() == 1.0
    # The optimizer still holds the parameters of its model.
    assert loaded.getOptimizer().param_groups[0]["params"][0] is loaded.getModel().weight
    assert loaded.getOptimizer().param_groups[0]["momentum"] == 0.9


def test_a_loaded_model_scores_the_same(tmp_path):
    import pyarrow as pa

    model = TorchModel(
        model=torch.nn.Linear(2, 1),
        feature_columns=["a"],
        label_columns=["y"],
        history=[{"epoch": 0, "train": {"loss": 0.5, "all_metrics": []}}],
        _metadata={"feature_dtypes": ("float32",), "output_types": ("float64",)},
    )
    model.write().overwrite().save(str(tmp_path / "stage"))
    loaded = TorchModel.load(str(tmp_path / "stage"))
    table = pa.table({"a": [[1.0, 2.0], [3.0, 4.0]]})
    assert loaded.transform(table) == model.transform(table)
    assert loaded.getHistory() == model.getHistory()


def test_the_metadata_is_spark_mls(tmp_path):
    saved = estimator()
    saved.save(str(tmp_path / "stage"))
    lines = (tmp_path / "stage" / "metadata" / "part-00000").read_text().splitlines()
    assert len(lines) == 1
    metadata = json.loads(lines[0])
    assert metadata["class"] == "hvd_cluster.estimators.torch.estimator.TorchEstimator"
    assert metadata["uid"] == saved.uid
    assert metadata["paramMap"]["epochs"] == 4
    assert metadata["defaultParamMap"]["batch_size"] == 32


def test_backend_and_credentials_are_not_saved(tmp_path):
    saved = estimator().setBackend(LocalBackend(2))
    saved.setStore(Store.create(tmp_path / "work", storage_options={"secret": "swordfish"}))
    saved.save(str(tmp_path / "stage"))
    loaded = TorchEstimator.load(str(tmp_path / "stage"))
    assert loaded.getBackend() is None
    assert loaded.getStore() == str(tmp_path / "work")
    assert b"swordfish" not in b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_overwriting_must_be_requested(tmp_path):
    path = str(tmp_path / "stage")
    estimator().save(path)
    with pytest.raises(DataError, match=r"exists already.*overwrite\(\)"):
        estimator().save(path)
    again = estimator().setEpochs(9)
    again.write().overwrite().save(path)
    assert TorchEstimator.load(path).getEpochs() == 9


def test_overwriting_with_what_cannot_be_pickled_keeps_the_earlier_stage(tmp_path):
    path = str(tmp_path / "stage")
    estimator().save(path)
    lock = threading.Lock()
    with pytest.raises(TypeError, match="lock"):
        estimator().setTransformationFn(lambda row: {**row, "lock": lock}).write().overwrite().save(path)
    assert TorchEstimator.load(path).getLoss() is F.mse_loss


def test_defaults_that_a_program_has_set_are_loaded(tmp_path):
    saved = estimator()
    saved._setDefault(batch_size=64)
    saved.save(str(tmp_path / "stage"))
    loaded = TorchEstimator.load(str(tmp_path / "stage"))
    assert (loaded.getBatchSize(), loaded.isSet("batch_size")) == (64, False)


def test_a_folder_without_metadata_is_not_a_stage(tmp_path):
    path = tmp_path / "stage"
    estimator().save(str(path))
    for file in (path / "metadata").iterdir():
        file.unlink()
    for place in (path, tmp_path / "nothing"):
        with pytest.raises(DataError, match="not a saved stage.*there is no metadata/part-00000 in it"):
            TorchEstimator.load(str(place))


def test_loading_as_another_class_names_the_right_one(tmp_path):
    estimator().save(str(tmp_path / "stage"))
    with pytest.raises(DataError, match=r"holds a TorchEstimator.*TorchEstimator\.load"):
        TorchModel.load(str(tmp_path / "stage"))


@pytest.mark.parametrize("writer_has_spark", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_stages_move_between_environments_with_and_without_spark(tmp_path, writer_has_spark):
    pytest.importorskip("pyspark", reason="pyspark is not installed")
    write = """
        import torch
        from hvd_cluster.estimators import TorchModel
        torch.manual_seed(0)
        TorchModel(model=torch.nn.Linear(2, 1), label_columns=["y"], run_id="r").save(path)
    """
    read = """
        from hvd_cluster.estimators import TorchModel
        model = TorchModel.load(path)
        print(model.getRunId(), model.getModel().weight.sum().item())
    """
    python(write, with_spark=writer_has_spark, path=tmp_path / "stage")
    torch.manual_seed(0)
    weight = torch.nn.Linear(2, 1).weight.sum().item()
    assert python(read, with_spark=not writer_has_spark, path=tmp_path / "stage") == f"r {weight}"


def python(code, *, with_spark, path):
    """Run code in a new process, optionally without pyspark, ray and tensorflow."""
    start = "" if with_spark else "import absent; absent.block('pyspark', 'ray', 'tensorflow')\n"
    program = f"{start}path = {str(path)!r}\n{textwrap.dedent(code)}"
    environ = {"PYTHONPATH": str(HERE / "scripts"), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_saved_stage_has_the_installed_spark_version(tmp_path):
    pyspark = pytest.importorskip("pyspark", reason="pyspark is not installed")
    estimator().save(str(tmp_path / "stage"))
    metadata = json.loads((tmp_path / "stage" / "metadata" / "part-00000").read_text())
    assert metadata["sparkVersion"] == pyspark.__version__


@pytest.fixture
def shelf(spark, monkeypatch):
    """The session's default filesystem: the local one by another name, to Spark and to us; what we opened there."""
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    from fsspec.implementations.local import LocalFileSystem

    opened = []

    class Shelf(LocalFileSystem):
        protocol = "shelf"

        def _open(self, path, *args, **kwargs):
            opened.append(path)
            return super()._open(path, *args, **kwargs)

        @classmethod
        def _strip_protocol(cls, path):
            return super()._strip_protocol(path.removeprefix("shelf:"))

    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "shelf", Shelf)
    hadoop = spark.sparkContext._jsc.hadoopConfiguration()
    before = hadoop.get("fs.defaultFS")
    hadoop.set("fs.shelf.impl", "org.apache.hadoop.fs.ProxyLocalFileSystem")
    hadoop.set("fs.defaultFS", "shelf:///")
    yield opened
    hadoop.set("fs.defaultFS", before)
    hadoop.unset("fs.shelf.impl")


@pytest.mark.spark("local")
def test_a_stage_is_saved_on_sparks_default_filesystem_like_the_rest_of_its_pipeline(shelf, tmp_path):
    saved, metadata = estimator(), str(tmp_path / "stage" / "metadata" / "part-00000")
    saved.save(str(tmp_path / "stage"))
    assert any(metadata in path for path in shelf)
    shelf.clear()
    assert TorchEstimator.load(str(tmp_path / "stage")).uid == saved.uid
    assert any(metadata in path for path in shelf)
    saved.write().overwrite().save(str(tmp_path / "stage"))


@pytest.mark.spark("local")
def test_paths_with_a_scheme_or_below_a_mount_are_unchanged(shelf, tmp_path):
    estimator().save(f"file://{tmp_path}/stage")
    assert TorchEstimator.load(f"file:{tmp_path}/stage").getEpochs() == 4
    assert store_at("/Volumes/main/a/b").prefix == "/Volumes/main/a/b"
    assert shelf == []


def test_dbfs_without_its_mount_gives_an_error_with_the_remedy(monkeypatch):
    monkeypatch.setattr(persistence, "spark_url", lambda path: f"dbfs://{path}")
    with pytest.raises(DataError, match=r"(?s)Spark resolves /models/x to dbfs:///models/x, which this process cannot"):
        store_at("/models/x")


@pytest.mark.spark("local")
def test_an_unreachable_default_filesystem_gives_an_error_with_the_remedy(spark, tmp_path):
    hadoop = spark.sparkContext._jsc.hadoopConfiguration()
    before = hadoop.get("fs.defaultFS")
    hadoop.set("fs.unreachable.impl", "org.apache.hadoop.fs.ProxyLocalFileSystem")
    hadoop.set("fs.defaultFS", "unreachable:///")
    try:
        with pytest.raises(
            DataError, match=rf"Spark resolves {tmp_path}/stage to unreachable:.*file://{tmp_path}/stage"
        ):
            estimator().save(str(tmp_path / "stage"))
    finally:
        hadoop.set("fs.defaultFS", before)
    assert not (tmp_path / "stage").exists()
