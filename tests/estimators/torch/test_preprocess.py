"""Raw columns: strings, bytes, structs and nulls through ``preprocess``, in training and in scoring."""

from __future__ import annotations

import datetime as dt
import io
import sys

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from hvd_cluster.errors import DataError, WorkerFailedError
from hvd_cluster.estimators import TorchEstimator, TorchModel
from hvd_cluster.estimators.spec import Inputs
from hvd_cluster.estimators.torch.arguments import label_keywords, with_arguments

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WORDS = ["good", "bad", "fine", "awful", "nice", "poor"]


def tokens(batch):
    ids = np.zeros((len(batch["text"]), 4), np.int64)
    for row, text in enumerate(batch["text"]):
        if text is not None:
            ids[row, :3] = [WORDS.index(word) + 1 for word in text.split()]
    return {"input_ids": ids, "mask": (ids > 0).astype(np.float64)}


class Classifier(torch.nn.Module):
    """Like those of transformers: arguments by name, an output of several parts, and its own loss."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 8)
        self.last = torch.nn.Linear(8, 2)

    def forward(self, input_ids, mask=None, labels=None):
        assert input_ids.dtype == torch.int64
        assert mask.dtype == torch.float32
        hidden = (self.embedding(input_ids) * mask.unsqueeze(-1)).mean(1)
        logits = self.last(hidden)
        output = {"logits": logits, "hidden": hidden, "cache": None}
        if labels is not None:
            output["loss"] = F.cross_entropy(logits, labels)
        return output


@pytest.fixture(scope="module")
def reviews():
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, 3)) if row % 11 else None for row in range(160)]
    labels = [int(text is not None and ("good" in text or "nice" in text)) for text in texts]
    return pd.DataFrame({"text": texts, "label": labels})


def estimator(backend, model=None, **params):
    torch.manual_seed(0)
    model = Classifier() if model is None else model
    given = {
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters(), lr=0.05),
        "feature_cols": ["text"],
        "label_cols": ["label"],
        "preprocess": tokens,
        "batch_size": 16,
        "epochs": 3,
        "verbose": 0,
        "random_seed": 1,
        "backend": backend,
        **params,
    }
    return TorchEstimator(**given)


def local_scores(model, frame, fn=tokens):
    net, made = model.getModel().eval(), fn({"text": frame["text"].astype(object).to_numpy(na_value=None)})
    with torch.no_grad():
        return net(torch.from_numpy(made["input_ids"]), torch.from_numpy(made["mask"]).float())


def test_an_array_without_a_name_leaves_a_label_its_name(reviews, one_worker):
    frame = reviews.assign(features=1.0, text=reviews["label"])
    fit = estimator(
        one_worker,
        torch.nn.Linear(1, 1),
        feature_cols=["text", "label"],
        label_cols=["features"],
        preprocess=lambda batch: batch["label"][:, None].astype("float32"),
        loss=F.mse_loss,
        epochs=1,
    )
    model = fit.fit(frame)
    expected = model.getModel()(torch.tensor(frame["label"].to_numpy(np.float32))[:, None]).detach().numpy()
    assert np.allclose(model.transform(frame)["features__output"], expected[:, 0])


def test_a_model_with_its_own_loss_learns_from_text_and_scores_it(reviews, two_workers, tmp_path):
    model = estimator(two_workers, validation=0.2).fit(reviews)
    losses = [record["train"]["loss"] for record in model.getHistory()]
    assert losses[-1] < 0.8 * losses[0]
    assert "validation" in model.getHistory()[-1]
    scored = model.transform(reviews)
    expected = local_scores(model, reviews)
    # Two outputs for one label column: they go by their own names.
    assert list(scored) == ["text", "label", "logits__output", "hidden__output"]
    assert np.array_equal(np.stack(scored["logits__output"]), expected["logits"])
    assert np.array_equal(np.stack(scored["hidden__output"]), expected["hidden"])
    model.save(str(tmp_path / "model"))
    again = TorchModel.load(str(tmp_path / "model"))
    assert again.transform(reviews).equals(scored)
    table = again.transform(pa.Table.from_pandas(reviews))
    assert table["logits__output"].to_pylist() == [list(row) for row in scored["logits__output"]]


def test_output_fn_takes_what_loss_metrics_and_transform_use(reviews, two_workers):
    fit = estimator(
        two_workers,
        loss=F.cross_entropy,
        output_fn=lambda output: output["logits"],
        metrics={"right": lambda output, label: (output.argmax(1) == label).float().mean()},
        output_kinds=["argmax"],
        output_cols=["guess"],
    )
    model = fit.fit(reviews)
    scored = model.transform(reviews)
    assert scored["guess"].tolist() == local_scores(model, reviews)["logits"].argmax(1).tolist()
    assert model.getHistory()[-1]["train"]["all_metrics"][0]["right"] > 0.6
    row = model.get_prediction_fn()(model.getModel(), {"text": "good bad nice"})
    assert torch.allclose(row, local_scores(model, pd.DataFrame({"text": ["good bad nice"]}))["logits"])


def pixels(batch):
    return np.stack([np.asarray(Image.open(io.BytesIO(data)), np.float32) / 255 for data in batch["image"]])


def png(array):
    file = io.BytesIO()
    Image.fromarray(array).save(file, "png")
    return file.getvalue()


@pytest.fixture(scope="module")
def images():
    rng = np.random.default_rng(0)
    arrays = rng.integers(0, 256, (60, 4, 4), dtype=np.uint8)
    return pd.DataFrame({"image": [png(one) for one in arrays], "y": arrays.mean((1, 2)) / 255})


def image_estimator(backend, **params):
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 1))
    given = {"feature_cols": ["image"], "label_cols": ["y"], "preprocess": pixels, "loss": F.mse_loss, **params}
    return estimator(backend, net, **given)


@pytest.mark.parametrize("pool", ["thread", "dummy", pytest.param("process", marks=pytest.mark.slow)])
def test_images_are_decoded_where_the_reader_runs(images, two_workers, pool):
    model = image_estimator(two_workers, reader_pool_type=pool, epochs=2).fit(images)
    with torch.no_grad():
        expected = model.getModel()(torch.from_numpy(pixels({"image": images["image"]}))).flatten()
    assert np.array_equal(model.transform(images)["y__output"].to_numpy(np.float32), expected.numpy())


def test_bad_rows_are_left_out_and_counted_or_end_the_fit(images, two_workers):
    broken = images.copy()
    broken.loc[17, "image"] = b"not an image"
    with pytest.raises((DataError, WorkerFailedError), match=r"preprocess failed on row \d+ of .*: UnidentifiedImage"):
        image_estimator(two_workers, epochs=1).fit(broken)
    model = image_estimator(two_workers, epochs=2, on_error="skip", validation=None).fit(broken)
    assert [record["left_out_rows"] for record in model.getHistory()] == [1, 1]
    assert model.history["left_out_rows"].tolist() == [1, 1]
    assert model.transform(broken).index.tolist() == [row for row in range(60) if row != 17]
    scored = model.copy({model.on_error: "null"}).transform(broken)
    assert np.flatnonzero(scored["y__output"].isna()).tolist() == [17]
    assert model.copy({model.on_error: "null"}).transform(broken[17:18])["y__output"].isna().all()
    text = 'preprocess failed on row 17 of the rows to score: UnidentifiedImageError(.|\n)*on_error="null"'
    with pytest.raises(DataError, match=text):
        model.copy({model.on_error: "raise"}).transform(broken)


def test_bad_rows_of_the_validation_are_counted_apart(images, two_workers):
    broken = images.assign(held=images.index % 4 == 1)
    for row in (16, 17, 21):  # one of the training rows, and two that are held out
        broken.loc[row, "image"] = b"not an image"
    model = image_estimator(two_workers, epochs=2, on_error="skip", validation="held", val_batch_size=1).fit(broken)
    assert [record["left_out_rows"] for record in model.getHistory()] == [1, 1]
    assert model.history["validation_left_out_rows"].tolist() == [2, 2]


def noisy(batch, *, training, rng):
    values = pixels(batch)
    return values + rng.normal(size=values.shape) if training else values


def test_augmentation_is_the_same_to_the_bit_after_a_resume(images, two_workers, tmp_path):
    def weights(**params):
        given = {"preprocess": noisy, "store": str(tmp_path / "store"), "batch_size": 4, "validation": 0.2, **params}
        model = image_estimator(two_workers, **given).fit(images)
        return torch.cat([one.flatten() for one in model.getModel().state_dict().values()]), model

    whole, _ = weights(epochs=4, run_id="whole")
    weights(epochs=2, run_id="parts")
    resumed, model = weights(epochs=4, run_id="parts")
    assert torch.equal(resumed, whole)
    without, _ = weights(epochs=4, run_id="plain", preprocess=pixels)
    assert not torch.equal(whole, without)
    twice = [model.transform(images)["y__output"] for _ in range(2)]
    assert twice[0].equals(twice[1])


@pytest.mark.needs("pandas>=2.2")  # an older one makes objects of nullable columns
def test_many_kinds_of_columns_become_the_arguments_of_a_tabular_net(two_workers):
    rows = 80
    frame = pd.DataFrame(
        {
            "city": pd.Categorical([["Rome", "Oslo"][row % 2] for row in range(rows)]),
            "price": [None if row % 5 == 0 else row / 10 for row in range(rows)],
            "day": pd.date_range("2024-01-01", periods=rows),
            "tags": [["a"] * (row % 3) for row in range(rows)],
            "size": pd.array([row if row % 4 else None for row in range(rows)], dtype="Int64"),
            "y": np.arange(rows, dtype=np.float32),
        }
    )

    def encode(batch):
        month = batch["day"].astype("datetime64[M]").astype(np.int64) % 12
        numbers = [np.nan_to_num(batch["price"]), [len(tags) for tags in batch["tags"]], np.nan_to_num(batch["size"])]
        return {
            "city": (batch["city"] == "Rome").astype(np.int64),
            "month": month,
            "numbers": np.stack(numbers, axis=1),
        }

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.city, self.month = torch.nn.Embedding(2, 3), torch.nn.Embedding(12, 3)
            self.last = torch.nn.Linear(9, 1)

        def forward(self, numbers, city, month):  # by name: in another order than the function returns them
            return self.last(torch.cat([numbers, self.city(city), self.month(month)], 1))

    fit = estimator(
        two_workers, Net(), feature_cols=None, label_cols=["y"], preprocess=encode, loss=F.mse_loss, batch_size=8
    )
    model = fit.fit(frame)
    assert model.getFeatureColumns() == ["city", "price", "day", "tags", "size"]
    batch = encode({name: frame[name].to_numpy() for name in model.getFeatureColumns()})
    with torch.no_grad():
        numbers = torch.from_numpy(np.asarray(batch["numbers"], np.float32))
        expected = model.getModel()(numbers, torch.from_numpy(batch["city"]), torch.from_numpy(batch["month"]))
    assert np.array_equal(model.transform(frame)["y__output"].to_numpy(np.float32), expected.flatten().numpy())


def test_a_feature_may_also_be_the_label(two_workers):
    matrices = np.random.default_rng(0).normal(size=(40, 2, 3))
    frame = pd.DataFrame({"m": list(matrices)})
    columns = {"feature_cols": ["m"], "label_cols": ["m"], "preprocess": lambda batch: batch["m"] * 2}
    model = estimator(two_workers, torch.nn.Linear(3, 3), loss=F.mse_loss, epochs=1, **columns).fit(frame)
    with torch.no_grad():
        expected = model.getModel()(torch.from_numpy(matrices * 2).float()).flatten(1)
    assert np.allclose(np.stack(model.transform(frame)["m__output"]), expected, atol=1e-6)


@pytest.mark.parametrize("batch_format", ["numpy", "pyarrow"])
def test_scoring_gets_columns_in_the_types_of_the_training(one_worker, batch_format, tmp_path):
    depth = np.arange(0, 2000, 50).astype("uint16")
    tags = pd.Categorical(["a", "bb"] * 20)
    frame = pd.DataFrame({"depth": depth, "weight": depth.astype("uint64") + 1, "tag": tags})

    def encode(batch):
        """Whole numbers below 0 where the type has a sign; lengths of strings."""
        columns = {name: batch[name].to_numpy() for name in batch.column_names} if batch_format == "pyarrow" else batch
        types = [str(batch[name].type) for name in batch.column_names] if batch_format == "pyarrow" else []
        below = [columns[name] - columns[name].dtype.type(1000) for name in ("depth", "weight")]
        lengths = [float(len(text)) for text in columns["tag"]]
        return np.stack([*below, lengths, np.full(len(below[0]), any("dict" in one for one in types))], 1) / 1000

    net = torch.nn.Linear(4, 1)
    fit = estimator(
        one_worker,
        net,
        feature_cols=["depth", "weight", "tag"],
        label_cols=["depth"],
        sample_weight_col="weight",
        preprocess=encode,
        batch_format=batch_format,
        loss=F.mse_loss,
        epochs=1,
    )
    model = fit.fit(frame)
    signed = np.stack([depth.astype(float) - 1000, depth.astype(float) - 999, [1.0, 2.0] * 20, np.zeros(40)], 1) / 1000
    with torch.no_grad():
        expected = model.getModel()(torch.from_numpy(signed).float()).numpy()
    model.setOutputKinds(["array"]).write().overwrite().save(str(tmp_path / "model"))
    for scoring in (model, TorchModel.load(str(tmp_path / "model"))):
        assert np.allclose(np.stack(scoring.transform(frame)["depth__output"]), expected, atol=1e-5)


def test_a_dictionary_column_of_parquet_is_read_as_its_values(one_worker, tmp_path):
    tags = pa.array(["a", "bb"] * 20)
    pq.write_table(pa.table({"tag": tags.dictionary_encode(), "y": np.arange(40.0)}), tmp_path / "rows.parquet")

    def encode(batch):
        assert batch.schema.types == [pa.string()]
        return np.array([[float(len(text))] for text in batch["tag"].to_pylist()])

    given = {"feature_cols": ["tag"], "label_cols": ["y"], "preprocess": encode, "batch_format": "pyarrow"}
    model = estimator(one_worker, torch.nn.Linear(1, 1), loss=F.mse_loss, epochs=1, **given).fit(str(tmp_path))
    assert len(model.transform(pa.table({"tag": tags.dictionary_encode()}))["y__output"]) == 40


def test_a_signature_allows_nulls_unless_no_row_has_them(two_workers):
    count = pd.array([row if row < 1100 or row % 2 else None for row in range(1200)], dtype="Int64")
    frame = pd.DataFrame({"count": count, "row": range(1200), "label": np.arange(1200.0)})
    both = ["count", "row"]

    def encode(batch):
        return np.stack([np.nan_to_num(batch[name].astype(float)) / 1200 for name in both], 1)

    net = torch.nn.Linear(2, 1)
    fit = estimator(two_workers, net, feature_cols=both, preprocess=encode, loss=F.mse_loss, epochs=1, batch_size=200)
    schema = fit.fit(frame)._get_metadata()["feature_schema"]
    assert [schema.field(name).nullable for name in both] == [True, False]


def test_a_model_that_was_not_fitted_scores_raw_columns_too(reviews):
    torch.manual_seed(0)
    model = TorchModel(
        model=Classifier(),
        preprocess=tokens,
        output_fn=lambda output: output["logits"],
        feature_columns=["text"],
        label_columns=["label"],
    )
    found = np.stack(model.transform(reviews)["label__output"])
    assert np.array_equal(found, local_scores(model, reviews)["logits"])


class Difference(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, first, second, labels=None):
        assert labels is None
        return (first - second) * self.weight


def two_values(batch):
    """Whole numbers where no age is null, and names in an order that changes from batch to batch."""
    made = {"age": np.nan_to_num(batch["age"]), "days": (batch["day"] - np.datetime64("2024-01-01")).astype("int64")}
    assert batch["day"].dtype == "datetime64[D]"
    return made if len(batch["age"]) % 2 else dict(reversed(made.items()))


def test_a_model_scores_with_the_types_and_the_order_of_its_training(two_workers):
    days = [dt.date(2024, 1, 1 + row % 28) for row in range(64)]
    ages = [None if row % 5 == 0 else row for row in range(64)]
    table = pa.table({"age": pa.array(ages, pa.int64()), "day": days, "y": [1.0] * 64})
    model = estimator(
        two_workers,
        Difference(),
        loss=F.mse_loss,
        preprocess=two_values,
        feature_cols=["age", "day"],
        label_cols=["y"],
        epochs=1,
    ).fit(table)
    weight = model.getModel().weight.item()
    expected = [((age or 0) - day.day + 1) * weight for age, day in zip(ages, days, strict=True)]
    sign = 1 if model._get_metadata()["made"] == ("age", "days") else -1
    frame = table.to_pandas()
    for rows in (frame, frame.assign(day=pd.to_datetime(frame["day"])), frame[1:4], frame[:1], frame[1:5]):
        assert model.transform(rows)["y__output"].tolist() == pytest.approx(
            [sign * expected[row] for row in rows.index]
        )
    with pytest.raises(DataError, match="preprocess returned 1.5 in 'days', but int64 for the rows that the model was"):
        model.setPreprocess(lambda batch: {"age": batch["age"], "days": np.array([1.5])}).transform(table[:1])


def test_whole_numbers_do_not_wrap_into_the_dtype_of_the_trial(one_worker):
    def smallest(batch):
        return pd.to_numeric(pd.Series(batch["n"]), downcast="unsigned").to_numpy()

    class Scores(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.score = torch.nn.Embedding(400, 1)

        def forward(self, n):
            return self.score(n.int())

    params = {"feature_cols": ["n"], "label_cols": ["y"], "loss": F.mse_loss, "epochs": 1, "shuffle": False}
    frame = pd.DataFrame({"n": np.arange(32) % 4 + 1, "y": 1.0})
    model = estimator(one_worker, Scores(), preprocess=smallest, **params).fit(frame)
    with pytest.raises(DataError, match=r"preprocess returned 300 in 'n', but uint8 .* array\.astype\('int64'\)"):
        model.transform(pd.DataFrame({"n": [300]}))
    with pytest.raises(WorkerFailedError, match="preprocess returned 300 in 'n', but uint8"):
        estimator(one_worker, Scores(), preprocess=smallest, **params).fit(
            frame.replace({"n": {4: 300}}).sort_values("n")
        )


def test_a_fraction_is_not_cut_off_for_a_model_that_takes_whole_numbers(one_worker):
    params = {"feature_cols": ["n"], "label_cols": ["y"], "loss": F.mse_loss, "epochs": 1, "preprocess": None}
    model = estimator(one_worker, torch.nn.Embedding(9, 1), **params).fit(
        pd.DataFrame({"n": np.arange(32) % 8, "y": 1.0})
    )
    with pytest.raises(DataError, match=r"feature column 'n' holds 1\.7, which int64 cannot hold"):
        model.transform(pd.DataFrame({"n": [1.7]}))
    assert len(model.transform(pd.DataFrame({"n": [1.0]}))) == 1


def test_what_only_scoring_would_find_is_found_before_the_training(two_workers, reviews, caplog):
    def unlike(batch, *, training):
        return tokens(batch) if training else {"input_ids": tokens(batch)["input_ids"]}

    runs = two_workers.runs
    with pytest.raises(DataError, match="it returned 'input_ids', but 'input_ids', 'mask' for the rows that"):
        estimator(two_workers, preprocess=unlike).fit(reviews)
    assert two_workers.runs == runs

    class NeedsLabels(Classifier):
        def forward(self, input_ids, mask, labels):
            return super().forward(input_ids, mask, labels)

    estimator(two_workers, NeedsLabels(), epochs=1).fit(reviews)
    assert "the model can be trained, but transform would fail or give other outputs: TypeError" in caplog.text

    def halves(batch, *, training):
        made = tokens(batch)
        return made if training else {**made, "input_ids": made["input_ids"] + 0.5}

    caplog.clear()
    estimator(two_workers, preprocess=halves, epochs=1).fit(reviews)
    assert "transform would fail or give other outputs: DataError: preprocess returned" in caplog.text


def test_mistakes_are_named_before_any_worker_starts(reviews, two_workers):
    runs = two_workers.runs
    with pytest.raises(ValueError, match="transformation_fn and preprocess exclude each other"):
        estimator(two_workers, transformation_fn=dict).fit(reviews)
    with pytest.raises(ValueError, match="input_shapes and preprocess exclude each other"):
        estimator(two_workers, input_shapes=[[-1, 4]]).fit(reviews)
    with pytest.raises(ValueError, match="sample_weight_col has no effect on the loss that the model computes itself"):
        estimator(two_workers, sample_weight_col="label").fit(reviews)
    net = torch.nn.Linear(4, 1)
    with pytest.raises(ValueError, match=r"loss is required: .*, or a model whose forward\(\) takes the labels"):
        estimator(two_workers, net).fit(reviews)
    with pytest.raises(
        DataError,
        match="the model does not take what preprocess returns(.|\n)*gets input_ids, mask in this order: not all",
    ):
        estimator(two_workers, net, loss=F.mse_loss).fit(reviews)
    with pytest.raises(DataError, match=r"return floats where the model computes with numbers: text \(int64\)"):
        estimator(two_workers, net, preprocess=lambda batch: tokens(batch)["input_ids"], loss=F.mse_loss).fit(reviews)
    with pytest.raises(
        DataError, match="preprocess returned 'labels', by which the model gets the label column 'label'"
    ):
        estimator(two_workers, preprocess=lambda batch: {**tokens(batch), "labels": [1] * len(batch["text"])}).fit(
            reviews
        )
    with pytest.raises(DataError, match="preprocess returned 'label', which is another column's name"):
        estimator(two_workers, preprocess=lambda batch: {"label": tokens(batch)["mask"]}).fit(reviews)
    with pytest.raises(DataError, match=r"KeyError: 'label' \(.*\); it gets the feature columns only"):
        estimator(two_workers, preprocess=lambda batch: batch["label"]).fit(reviews)
    with pytest.raises(ValueError, match="on_error='ignore'"):
        estimator(two_workers, on_error="ignore")
    with pytest.raises(DataError, match="no tensor can be made of column 'text'"):
        estimator(two_workers, preprocess=None).fit(reviews.dropna())
    assert two_workers.runs == runs


def test_arguments_go_by_name_where_forward_has_them_all():
    made = {"b": torch.zeros(2, dtype=torch.int32), "a": torch.zeros(2, dtype=torch.float64)}
    inputs = Inputs(feature_cols=("a", "b"), label_cols=("y",))

    class Named(torch.nn.Linear):
        def forward(self, a, b=None, labels=None): ...

    class Others(torch.nn.Linear):
        def forward(self, a, other): ...

    class Any_(torch.nn.Linear):
        def forward(self, a, *args, y=None, **kwargs): ...

    def of(cls, made=made):
        found = with_arguments(inputs, cls(1, 1), made)
        return found.made, found.by_keyword, found.feature_dtypes

    assert of(Named) == (("a", "b"), True, ("float32", "int32"))
    assert of(Others) == (("a", "b"), False, ("float32", "int32"))
    assert of(Any_) == (("a", "b"), True, ("float32", "int32"))
    assert of(Others, {"c": made["b"], "d": made["a"]}) == (("c", "d"), False, ("int32", "float32"))
    with pytest.raises(
        DataError, match=r"returned 'c', which the model's forward\(\) does not take; it takes a, other"
    ):
        of(Others, {"c": made["b"], "a": made["a"]})

    class Wrapper(torch.nn.Module):
        def __init__(self, *args):
            super().__init__()
            self.inner = Named(*args)

        def forward(self, *args, **kwargs):
            return self.inner(*args, **kwargs)

    ids = {"ids": made["b"], "mask": made["a"]}
    assert of(Wrapper, ids) == (("ids", "mask"), True, ("int32", "float32"))
    assert of(Wrapper)[:2] == (("a", "b"), False)  # the names are those of the columns: their order counts
    assert of(lambda *args: torch.nn.DataParallel(Named(*args)))[:2] == (("a", "b"), True)
    # What is returned without a name has that of the column, and is passed by position nevertheless.
    assert of(Named, {"b": made["b"]})[1] is False
    assert of(Named, {"features": made["b"]})[1] is False
    assert label_keywords(Named(1, 1), ["y"]) == ("labels",)
    assert label_keywords(Any_(1, 1), ["y"]) == ("y",)
    assert label_keywords(Others(1, 1), ["y"]) == ()
    assert label_keywords(Named(1, 1), ["y", "z"]) == ()


@pytest.mark.parametrize("fn", [lambda row: {**row, "x": row["x"] * 10}, None])
def test_the_fields_of_a_transformation_are_edited_in_scoring_too(one_worker, tmp_path, fn):
    x = np.arange(32) / 4
    params = {"preprocess": None, "transformation_fn": fn, "transformation_edit_fields": [("x", np.int32, (), False)]}
    net = torch.nn.Linear(1, 1)
    fit = estimator(
        one_worker,
        net,
        feature_cols=["x"],
        label_cols=["y"],
        input_shapes=[[-1, 1]],
        transformation_removed_fields=["z"],
        loss=F.mse_loss,
        epochs=1,
        **params,
    )
    frame = pd.DataFrame({"x": x, "y": x, "z": x})
    fit.fit(frame).write().overwrite().save(str(tmp_path / "model"))
    model = TorchModel.load(str(tmp_path / "model"))
    seen = np.floor(x * (1 if fn is None else 10))
    with torch.no_grad():
        expected = model.getModel()(torch.from_numpy(seen).float()[:, None]).flatten().numpy()
    scored = (model if fn is None else model.setTransformationFn(fn)).transform(frame)
    assert np.allclose(scored["y__output"], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("validation", "place"),
    [(None, "row 431 of the data"), (0.1, r"row \d+ of row group \d+ of the data that was written")],
)
def test_a_bad_row_of_a_frame_is_named_without_the_file_of_the_fit(one_worker, tmp_path, validation, place):
    def lengths(batch):
        if "bad" in list(batch["text"]):
            raise ValueError("not this one")
        return np.array([[float(len(text))] for text in batch["text"]])

    frame = pd.DataFrame({"text": ["a", "bb"] * 400, "y": 1.0})
    frame.loc[431, "text"] = "bad"
    given = {"feature_cols": ["text"], "label_cols": ["y"], "preprocess": lengths, "loss": F.mse_loss, "epochs": 1}
    given |= {"store": str(tmp_path), "validation": validation}
    with pytest.raises(WorkerFailedError, match=f"preprocess failed on {place}") as caught:
        estimator(one_worker, torch.nn.Linear(1, 1), **given).fit(frame)
    assert "intermediate" not in str(caught.value).partition("Traceback")[0]


@pytest.mark.parametrize("way", ["transform", "predictor", "export"])
def test_a_model_fitted_on_transformed_rows_says_so_once(frame, two_workers, caplog, tmp_path, way):
    def scaled(row):
        return {**row, "x": np.asarray(row["x"]) * 100}

    net = torch.nn.Linear(4, 1)
    params = {"loss": F.mse_loss, "preprocess": None, "transformation_fn": scaled, "epochs": 1}
    model = estimator(two_workers, net, feature_cols=["x"], label_cols=["y"], **params).fit(frame)
    for _ in range(2):
        arguments = {"transform": [frame], "export": [str(tmp_path / "model.pt2"), "torch"]}.get(way, [])
        getattr(model, way)(*arguments)
    (warning,) = [one.message for one in caplog.records if "as they are in the data" in one.message]
    assert "model.setTransformationFn(fn)" in warning
    assert "preprocess=fn" in warning
    applied = model.copy().setTransformationFn(scaled)
    scored = applied.transform(frame)["y__output"].to_numpy(np.float32)
    assert np.array_equal(applied.predictor()()(frame)["y__output"].to_numpy(np.float32), scored)
    with torch.no_grad():
        expected = model.getModel()(torch.from_numpy(np.stack(frame["x"]) * 100)).flatten().numpy()
    assert np.array_equal(scored, expected)
