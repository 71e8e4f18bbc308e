"""The same fit on every kind of Spark session, and the stages in Spark ML's pipelines and validators."""

from __future__ import annotations

import sys
from pathlib import Path

import cloudpickle
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from hvd_cluster.errors import DataError, LaunchError, NotEnoughSlotsError, WorkerFailedError
from hvd_cluster.estimators import ModelFactory, TorchEstimator, TorchModel

cloudpickle.register_pickle_by_value(sys.modules[__name__])

# Every kind of session that differs in how rows, models and files are sent; standalone equals local-cluster.
pytestmark = [pytest.mark.spark("local", "local-cluster", "connect"), pytest.mark.timeout(300)]

ROWS = 120


class Net(torch.nn.Module):
    """A number and three class scores from a vector of 3 and a number; ``ballast`` makes it heavy."""

    def __init__(self, ballast=0):
        super().__init__()
        torch.manual_seed(0)
        self.one = torch.nn.Linear(4, 1)
        self.three = torch.nn.Linear(4, 3)
        self.register_buffer("ballast", torch.rand(ballast))

    def forward(self, features, a):
        both = torch.cat([features, a.reshape(-1, 1)], dim=1)
        return self.one(both), self.three(both)


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(1)
    x, a = rng.normal(size=(ROWS, 3)), rng.normal(size=ROWS)
    y = x @ [1.0, 2.0, -1.0] + a
    columns = {"x0": x[:, 0], "x1": x[:, 1], "x2": x[:, 2], "a": a, "y": y, "c": np.digitize(y, [-1.0, 1.0])}
    return pd.DataFrame(columns)


@pytest.fixture
def data(spark, rows):
    """The same as a Spark DataFrame, and a column ``features`` of Spark ML vectors, some of them sparse."""
    from pyspark.ml.linalg import Vectors, VectorUDT
    from pyspark.sql.types import DoubleType, LongType, StructField, StructType

    def vector(values, index):
        return Vectors.sparse(3, dict(enumerate(values))) if index % 5 == 0 else Vectors.dense(values)

    records = [
        (index, vector(row[:3], index), *row[:5], int(row[5])) for index, row in enumerate(rows.to_numpy().tolist())
    ]
    fields = [("id", LongType()), ("features", VectorUDT())]
    fields += [(name, DoubleType()) for name in ("x0", "x1", "x2", "a", "y")] + [("c", LongType())]
    return spark.createDataFrame(records, StructType([StructField(*field) for field in fields])).repartition(3)


class Classes(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, features):
        return self.layer(features)


def estimator(store=None, net=None, **params):
    net = net or Net()
    given = {
        "model": net,
        "optimizer": torch.optim.Adam(net.parameters(), lr=0.05),
        "loss": [F.mse_loss, F.cross_entropy],
        "feature_cols": ["features", "a"],
        "label_cols": ["y", "c"],
        "validation": 0.2,
        "batch_size": 8,
        "epochs": 5,
        "num_proc": 2,
        "store": store and str(store),
        "verbose": 0,
        "scale_lr": False,
        "partitions_per_process": 2,
        **params,
    }
    return TorchEstimator(**given)


@pytest.mark.each_kind
def test_a_spark_frame_is_fitted_and_scored(spark, data, rows, tmp_path):
    from pyspark.ml.linalg import DenseVector, VectorUDT
    from pyspark.sql.types import DoubleType

    model = estimator(tmp_path).fit(data)
    losses = [record["train"]["loss"] for record in model.getHistory()]
    assert losses[-1] < losses[0]
    assert len(model.getHistory()[0]["samples_per_s"]) == len(model.getHistory()[0]["time_share"]) == 2
    left = {path.name for path in (tmp_path / "runs" / model.getRunId()).iterdir()}
    assert left - {"logs"} == {"checkpoint", "checkpoint.best"}

    scored = model.transform(data)
    assert scored.columns == [*data.columns, "y__output", "c__output"]
    assert isinstance(scored.schema["features"].dataType, VectorUDT)
    assert isinstance(scored.schema["y__output"].dataType, DoubleType)
    assert isinstance(scored.schema["c__output"].dataType, VectorUDT)
    found = sorted(scored.collect(), key=lambda row: row["id"])
    x = torch.tensor(rows[["x0", "x1", "x2"]].to_numpy(), dtype=torch.float32)
    with torch.no_grad():
        one, three = model.getModel()(x, torch.tensor(rows["a"].to_numpy(), dtype=torch.float32))
    assert np.allclose([row["y__output"] for row in found], one.flatten(), atol=1e-5)
    assert isinstance(found[0]["c__output"], DenseVector)
    assert np.allclose([row["c__output"].toArray() for row in found], three, atol=1e-5)
    with pytest.raises(ValueError, match="output column 'y__output' exists already"):
        model.transform(scored)


@pytest.mark.each_kind
def test_a_pipeline_scores_the_same_after_saving_and_loading(spark, data, tmp_path):
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.feature import VectorAssembler

    frame = data.drop("features")
    assembler = VectorAssembler(inputCols=["x0", "x1", "x2"], outputCol="features")
    pipeline = Pipeline(stages=[assembler, estimator(tmp_path / "work", epochs=1, num_proc=1)])
    for _ in range(2):
        pipeline.write().overwrite().save(str(tmp_path / "pipeline"))
    loaded = Pipeline.load(str(tmp_path / "pipeline"))
    assert loaded.getStages()[1].getFeatureCols() == ["features", "a"]
    fitted = loaded.fit(frame)
    fitted.save(str(tmp_path / "model"))
    again = PipelineModel.load(str(tmp_path / "model"))
    assert isinstance(again.stages[1], TorchModel)
    assert again.stages[1].uid == fitted.stages[1].uid
    first, second = (
        {row["id"]: (row["y__output"], row["c__output"]) for row in each.transform(frame).collect()}
        for each in (fitted, again)
    )
    assert first == second
    assert len(first) == ROWS


def test_a_single_stage_overwrites_an_older_one(spark, tmp_path):
    fresh = estimator(tmp_path)
    for epochs in (2, 3):
        fresh.setEpochs(epochs).write().overwrite().save(str(tmp_path / "stage"))
    assert TorchEstimator.load(str(tmp_path / "stage")).getEpochs() == 3


@pytest.mark.slow
@pytest.mark.spark("local", "connect")
# CrossValidator leaves its thread pool to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_cross_validation_fits_in_parallel(spark, data, tmp_path):
    from pyspark.ml.evaluation import RegressionEvaluator
    from pyspark.ml.tuning import CrossValidator, CrossValidatorModel, ParamGridBuilder

    fit = estimator(tmp_path / "work", num_proc=1, validation=None, epochs=3)
    grid = ParamGridBuilder().addGrid(fit.epochs, [1, 3]).build()
    judge = RegressionEvaluator(predictionCol="y__output", labelCol="y", metricName="rmse")
    search = CrossValidator(estimator=fit, estimatorParamMaps=grid, evaluator=judge, numFolds=2, parallelism=2, seed=3)
    found = search.fit(data)
    assert len(found.avgMetrics) == 2
    assert len(found.bestModel.getHistory()) in (1, 3)
    assert len(list((tmp_path / "work" / "runs").iterdir())) == 5
    found.save(str(tmp_path / "search"))
    loaded = CrossValidatorModel.load(str(tmp_path / "search"))
    assert loaded.transform(data).count() == ROWS


def heavy(seed):
    """A net above the size up to which a model is sent inside the function, and its model."""
    net = Net(ballast=1_000_000).eval()
    net.ballast.fill_(seed)
    return net, TorchModel(
        model=net,
        feature_columns=["features", "a"],
        label_columns=["y", "c"],
        _metadata={"feature_dtypes": ("float32", "float32"), "output_types": ("float32", "vector")},
    )


def test_a_large_model_reaches_the_tasks(spark, data):
    net, model = heavy(1)
    for _ in range(2):
        row = model.transform(data.where("id = 7")).first()
        x = torch.tensor(row["features"].toArray(), dtype=torch.float32).unsqueeze(0)
        with torch.no_grad():
            one, _ = net(x, torch.tensor([row["a"]], dtype=torch.float32))
        assert row["y__output"] == pytest.approx(one.item(), abs=1e-6)


@pytest.mark.spark("local", "connect")
def test_a_factory_makes_the_model_in_workers_and_tasks(spark, data):
    model = TorchEstimator(
        model=ModelFactory(Net, ballast=5_000_000),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        loss=[F.mse_loss, F.cross_entropy],
        feature_cols=["features", "a"],
        label_cols=["y", "c"],
        num_proc=2,
        verbose=0,
    ).fit(data)
    assert len(model._pickled_model()) < 50_000
    scored = model.transform(data).toPandas()
    local = model.transform(data.toPandas())
    np.testing.assert_array_equal(scored["y__output"], local["y__output"])


def test_a_custom_prediction_function_gets_spark_rows(spark, data):
    class Mine(TorchModel):
        def get_prediction_fn(self):
            def predict_fn(net, row):
                return float(row.features[0]) + row["id"], np.asarray(row.features.toArray())

            return predict_fn

    model = Mine(
        model=Net(),
        feature_columns=["features"],
        label_columns=["y", "c"],
        _metadata={"feature_dtypes": ("float32",), "output_types": ("float64", "vector")},
    )
    for row in model.transform(data.where("id < 6")).collect():
        assert row["y__output"] == pytest.approx(row["x0"] + row["id"])
        assert row["c__output"].toArray() == pytest.approx(row["features"].toArray())


@pytest.mark.parametrize("own", [False, True], ids=["by batches", "by rows"])
def test_any_column_may_have_dots_and_backticks_in_its_name(spark, data, own):
    class ByRows(TorchModel):
        def get_prediction_fn(self):
            return lambda net, row: (2 * row["a.b"], row["id.`x`"])

    class Double(torch.nn.Module):
        def forward(self, a):
            return 2 * a, a

    model = (ByRows if own else TorchModel)(
        model=Double(),
        feature_columns=["a.b"],
        label_columns=["y.1", "c"],
        _metadata={"feature_dtypes": ("float64",), "output_types": ("float64", "float64")},
    )
    odd = data.where("id < 6").select("a", "id", "features", "y").toDF("a.b", "id.`x`", "some features", "a")
    scored = model.transform(odd)
    assert scored.columns == ["a.b", "id.`x`", "some features", "a", "y.1__output", "c__output"]
    assert scored.schema.fields[:4] == odd.schema.fields
    found = scored.collect()
    assert len(found) == 6
    for row in found:
        assert row["y.1__output"] == pytest.approx(2 * row["a.b"])
        assert row["c__output"] == pytest.approx(row["id.`x`"] if own else row["a.b"])


@pytest.mark.spark("local")
def test_a_feature_that_no_tensor_can_hold_is_named_before_a_job_starts(spark, data):
    model = TorchModel(model=Net(), feature_columns=["features", "a"], label_columns=["y", "c"])
    texts = data.selectExpr("features", "string(a) AS a", "y")
    with pytest.raises(DataError, match=r"no tensor can be made of column 'a' \(string\)"):
        model.transform(texts)


#: Expressions of types that tensors cannot hold, and that some exports of Spark do not support.
ODD = {
    "year": "INTERVAL '-3' YEAR",
    "year.month": "INTERVAL '1-11' YEAR TO MONTH",
    "calendar": "make_interval(1, -2, 3, 4, 5, 6, 7.25)",
    "no year": "CAST(NULL AS INTERVAL MONTH)",
    "days": "INTERVAL '1' DAY",
    "nothing": "NULL",
    "nested": "named_struct('a', array(map('b', INTERVAL '2' HOUR)))",
}


@pytest.mark.spark("local", "connect")
def test_transform_keeps_columns_of_any_type(spark, data):
    from pyspark.sql import types
    from pyspark.sql.functions import expr

    odd = data.drop("id").coalesce(1).withColumns({name: expr(text) for name, text in ODD.items()})
    if not hasattr(types, "CalendarIntervalType"):  # before Spark 4, Python cannot read the schema with such a column
        odd = odd.drop("calendar")
    if hasattr(types, "VariantType"):
        odd = odd.withColumn("variant", expr("parse_json('[1]')"))
    model = TorchModel(model=torch.nn.Linear(1, 1), feature_columns=["a"], label_columns=["y"], input_shapes=[[-1, 1]])
    scored = model.transform(odd)
    types_of = [[(field.name, field.dataType) for field in frame.schema.fields] for frame in (scored, odd)]
    assert types_of[0][:-1] == types_of[1]
    # Intervals of months have no type in Python.
    texts = [f"CAST(`{name}` AS STRING)" for name in ["a", "variant", *ODD] if name in odd.columns]
    assert sorted(scored.selectExpr(*texts).collect()) == sorted(odd.selectExpr(*texts).collect())


@pytest.mark.spark("local", "connect")
def test_columns_that_python_cannot_read_are_named_before_a_job_starts(spark, data, tmp_path):
    model = TorchModel(model=Net(), feature_columns=["features", "a"], label_columns=["y", "c"])
    odd = data.selectExpr("features", "a", "array(INTERVAL '1' YEAR) AS `b.c`", "named_struct('d', 1, 'd', 2) AS d")
    with pytest.raises(DataError) as caught:
        model.transform(odd)
    assert str(caught.value) == (
        "column 'b.c' has the type array<interval year>, which Spark does not hand to Python: drop it, or cast it to "
        "string\ncolumn 'd' has the type struct<d:int,d:int>, which Spark does not hand to Python: drop it, or cast it "
        "to string"
    )
    used = data.selectExpr("a", "INTERVAL '1' YEAR AS e", "y")
    for store in (None, tmp_path):
        with pytest.raises(DataError, match=r"column 'e' has the type interval year, which no tensor can hold: cast"):
            estimator(store, feature_cols=["a", "e"], label_cols=["y"], loss=F.mse_loss).fit(used)


@pytest.mark.spark("local", "connect")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
def test_a_validation_split_fits_in_parallel_and_takes_spark_mls_names(spark, data, tmp_path):
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.tuning import ParamGridBuilder, TrainValidationSplit

    net = Classes()
    fit = TorchEstimator(
        model=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=0.05),
        loss=F.cross_entropy,
        featuresCol="features",
        labelCol="c",
        output_cols=["probability", "prediction", "logit"],
        output_kinds=["probability", "argmax", "columns"],
        num_proc=1,
        batch_size=16,
        verbose=0,
        store=str(tmp_path),
        random_seed=3,
    )
    grid = ParamGridBuilder().addGrid(fit.epochs, [1, 8]).build()
    judge = MulticlassClassificationEvaluator(predictionCol="prediction", labelCol="c", metricName="accuracy")
    search = TrainValidationSplit(
        estimator=fit, estimatorParamMaps=grid, evaluator=judge, parallelism=2, trainRatio=0.7, seed=3
    )
    found = search.fit(data)
    assert len(found.bestModel.getHistory()) == 8
    assert max(found.validationMetrics) > 0.5
    scored = found.transform(data)
    types = {field.name: field.dataType.simpleString() for field in scored.schema.fields}
    assert types["probability"] == "vector"
    assert types["prediction"] == "double"
    assert [types[f"logit_{index}"] for index in range(3)] == ["float"] * 3
    for row in scored.limit(5).collect():
        logits = torch.tensor([row[f"logit_{index}"] for index in range(3)])
        assert row["probability"].toArray() == pytest.approx(torch.softmax(logits, dim=0).numpy(), abs=1e-5)
        assert row["prediction"] == float(logits.argmax())


@pytest.mark.spark("local", "connect")
def test_a_stream_is_scored_batch_by_batch(spark, data, tmp_path):
    net = Net().eval()
    model = TorchModel(
        model=net,
        feature_columns=["features", "a"],
        label_columns=["y", "c"],
        _metadata={"feature_dtypes": ("float32", "float32"), "output_types": ("float32", "vector")},
    )
    data.select("id", "features", "a").repartition(3).write.parquet(str(tmp_path / "in"))
    stream = spark.readStream.schema(data.select("id", "features", "a").schema).parquet(str(tmp_path / "in"))

    def score(batch, number):
        model.transform(batch).select("id", "y__output").write.mode("append").parquet(str(tmp_path / "out"))

    query = stream.writeStream.foreachBatch(score).trigger(availableNow=True)
    query.option("checkpointLocation", str(tmp_path / "progress")).start().awaitTermination(100)
    streamed = {row["id"]: row["y__output"] for row in spark.read.parquet(str(tmp_path / "out")).collect()}
    at_once = {row["id"]: row["y__output"] for row in model.transform(data).collect()}
    assert len(streamed) == ROWS
    assert streamed == pytest.approx(at_once)


def test_too_few_slots_are_reported_before_the_data_is_written(data, tmp_path):
    from pyspark.sql import functions

    unread = data.withColumn("a", functions.raise_error(functions.lit("the data was asked for")).cast("double"))
    with pytest.raises(NotEnoughSlotsError, match="50 slots needed"):
        estimator(tmp_path, num_proc=50).fit(unread)


@pytest.mark.spark("local")
def test_a_model_that_executors_cannot_unpickle_is_rejected_before_anything_is_written(data, tmp_path, monkeypatch):
    (tmp_path / "onlyhere.py").write_text(
        "import torch\nclass Net(torch.nn.Linear):\n    def forward(self, features):\n"
        "        return super().forward(features)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import onlyhere

    store = tmp_path / "store"
    fit = estimator(store, onlyhere.Net(3, 3), feature_cols=["features"], label_cols=["c"], loss=F.cross_entropy)
    with pytest.raises(LaunchError) as caught:
        fit.fit(data)
    assert "TorchEstimator.fit cannot be rebuilt on the worker" in str(caught.value)
    assert "cannot import 'onlyhere'" in str(caught.value)
    assert "addPyFile" in str(caught.value)
    assert "No data has been written" in str(caught.value)
    assert not list(store.rglob("*.parquet"))


def test_the_users_own_traceback_comes_first(data, tmp_path):
    def broken(output, label):
        if len(output) == 8:  # not on the few rows of the trial
            raise KeyError("the user's mistake")
        return F.mse_loss(output, label)

    with pytest.raises(WorkerFailedError) as caught:
        estimator(tmp_path, loss=[broken, F.cross_entropy]).fit(data)
    assert "in broken" in str(caught.value).split("Rank ")[0]
    assert list(tmp_path.rglob("*.parquet")) == []


@pytest.mark.spark("local", "local-cluster")
def test_a_large_model_leaves_one_file_on_the_driver_for_all_transforms(spark, data):
    _, model = heavy(2)
    folder = Path(spark.sparkContext._temp_dir)
    before = set(folder.iterdir())
    scored = [model.transform(data.where(f"id < {count + 1}")) for count in range(10)]
    assert len(set(folder.iterdir()) - before) == 1
    assert [scored[count].count() for count in (0, 9)] == [1, 10]
