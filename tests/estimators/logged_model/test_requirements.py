"""What a model needs to be loaded elsewhere."""

from __future__ import annotations

import functools
import importlib
import sys
from importlib import metadata

import cloudpickle
import PIL.Image
import pytest
import torch

from hvd_cluster.estimators import TorchModel
from hvd_cluster.estimators.logged_model.columns_model import ColumnsScoring
from hvd_cluster.estimators.logged_model.log import Flavour, LoggedModel
from hvd_cluster.estimators.logged_model.requirements import _pickled, requirements_of
from hvd_cluster.estimators.logged_model.signature import Columns

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def names_of(found):
    return {line.partition("==")[0] for line in found.pip}


def test_torch_and_what_scoring_imports_are_always_required_with_the_versions_of_pypi():
    found = requirements_of([])
    version = torch.__version__.partition("+")[0]
    assert f"torch=={version}" in found.pip
    assert names_of(found) == {"cloudpickle", "numpy", "pandas", "pyarrow>=14", "torch"}
    assert found.local == ()


def test_packages_that_a_function_uses_are_required():
    def decoded(batch):
        return [PIL.Image.open(image) for image in batch["image"]]

    found = requirements_of([functools.partial(decoded)])
    assert f"pillow=={metadata.version('pillow')}" in found.pip
    assert "pytest" not in names_of(found)  # the module of the function is pickled with it, and not imported


def test_code_in_no_distribution_travels_and_its_imports_are_required(tmp_path, monkeypatch):
    (tmp_path / "my_features.py").write_text("import my_words\nfrom yaml import safe_load\ndef fn(batch): ...\n")
    (tmp_path / "my_words").mkdir()
    (tmp_path / "my_words" / "__init__.py").write_text("import PIL\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("my_features")
    try:
        found = requirements_of([module.fn])
        assert [(one.name, one.path.name) for one in found.local] == [
            ("my_features", "my_features.py"),
            ("my_words", "my_words"),
        ]
        assert {"PyYAML", "pillow"} <= names_of(found)
    finally:
        for name in ("my_features", "my_words"):
            sys.modules.pop(name, None)


@pytest.mark.parametrize("role", ["preprocess", "transformation_fn"])
def test_the_code_of_a_function_that_makes_the_models_arguments_travels(tmp_path, monkeypatch, role):
    (tmp_path / "my_rows.py").write_text("def fn(rows): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    function = importlib.import_module("my_rows").fn
    model = TorchModel(model=torch.nn.Linear(1, 1), feature_columns=["x"], label_columns=["y"], **{role: function})
    scoring = ColumnsScoring(scorer=model._scorer(on_spark=False), load=str, predict_fn=None)
    flavour = Flavour(name="pytorch", save=print, load=str, parts=[])
    logged = LoggedModel(
        flavour=flavour, scoring=scoring, columns=Columns(inputs=None, outputs=(), output_shapes=()), example=None
    )
    try:
        assert [one.name for one in logged.needs.local] == ["my_rows"]
    finally:
        sys.modules.pop("my_rows", None)


def test_the_numbers_of_a_model_are_not_pickled_to_find_its_modules():
    assert len(_pickled([torch.nn.Linear(1000, 1000), torch.ones(10_000).numpy()])) < 20_000


def test_modules_that_travel_are_left_out():
    needed = requirements_of([PIL.Image.open], ["yaml"], without=["PIL.Image", "PIL", "yaml"])
    assert not {"pillow", "PyYAML"} & names_of(needed)
