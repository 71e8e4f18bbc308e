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
from hvd_cluster.estimators.logged_model import requirements
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


@pytest.fixture
def acme(tmp_path, monkeypatch):
    """A namespace package of two distributions, acme-text and acme-image, of which nothing has been imported."""
    for name in ("text", "image"):
        folder = tmp_path / f"acme_{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme-{name}\nVersion: 1.0\n")
        (folder / "RECORD").write_text(f"acme/{name}.py,,\n{folder.name}/METADATA,,\n{folder.name}/RECORD,,\n")
        (tmp_path / "acme").mkdir(exist_ok=True)
        (tmp_path / "acme" / f"{name}.py").write_text("def fn(batch): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    requirements._packages.cache_clear()
    requirements._owners.cache_clear()
    yield
    requirements._packages.cache_clear()
    requirements._owners.cache_clear()
    for name in ("acme", "acme.text", "acme.image"):
        sys.modules.pop(name, None)


def test_each_part_of_a_namespace_package_is_required(acme):
    text, image = (importlib.import_module(f"acme.{name}") for name in ("text", "image"))
    found = requirements_of([lambda batch: (text.fn(batch), image.fn(batch))])
    assert {"acme-text==1.0", "acme-image==1.0"} <= set(found.pip)
    assert found.local == ()


def test_what_a_function_imports_when_it_is_called_is_required(acme):
    def encoded(batch):
        def inner():
            from acme import text

            return text.fn(batch)

        import acme.image
        import no_such_module  # noqa: F401

        return inner(), acme.image.fn(batch)

    found = requirements_of([encoded])
    assert {"acme-text==1.0", "acme-image==1.0"} <= set(found.pip)
    assert found.local == ()


def test_what_functions_of_local_code_import_is_required(acme, tmp_path):
    (tmp_path / "my_calls.py").write_text("def fn(batch):\n    from acme.text import fn\n    return fn(batch)\n")
    try:
        found = requirements_of([importlib.import_module("my_calls").fn])
        assert "acme-text==1.0" in found.pip
        assert [one.name for one in found.local] == ["my_calls"]
    finally:
        sys.modules.pop("my_calls", None)


_NET = """
import my_words.deep
import torch
from my_words import encoded as words
from my_words import *

class Net(torch.nn.Linear):
    def forward(self, x):
        self.fit(False)
        return super().forward(words(my_words.deep.lowered(x), widened))

    def fit(self, mode): ...

class Study:
    def encoded(self):
        import pytest

def fit():
    import hvd_cluster

async def main():
    from hvd_cluster.estimators import TorchEstimator
    import pyspark, pytest
    fit()

if __name__ == "__main__":
    import pytest
    main()
"""
_WORDS = """
def encoded(x, then):
    from acme.text import fn
    return _looked_up(then(x))

def _looked_up(x):
    match x:
        case _:
            import yaml
    return x

def widened(x):
    try:
        return x
    finally:
        import PIL

def plotted(x):
    import matplotlib.pyplot
    import acme.image
"""


def test_what_functions_of_local_code_import_that_scoring_does_not_call_is_not_required(acme, tmp_path):
    (tmp_path / "my_net.py").write_text(_NET)
    (tmp_path / "my_words").mkdir()
    (tmp_path / "my_words" / "__init__.py").write_text(_WORDS)
    (tmp_path / "my_words" / "deep.py").write_text("def lowered(x):\n    import psutil\n    return x\n")
    try:
        net = importlib.import_module("my_net").Net(1, 1)
        found = requirements_of([net])
        assert [one.name for one in found.local] == ["my_net", "my_words"]
        always = names_of(requirements_of([]))
        assert names_of(found) - always == {"acme-text", "PyYAML", "pillow", "psutil"}
        my_words = sys.modules["my_words"]
        assert "acme-image" in names_of(requirements_of([net, lambda batch: my_words.plotted(batch)]))
    finally:
        for name in ("my_net", "my_words", "my_words.deep"):
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
    assert len(_pickled([torch.nn.Linear(1000, 1000), torch.ones(10_000).numpy()])[0]) < 20_000


def test_modules_that_travel_are_left_out():
    needed = requirements_of([PIL.Image.open], ["yaml"], without=["PIL.Image", "PIL", "yaml"])
    assert not {"pillow", "PyYAML"} & names_of(needed)
