"""The params of a fit that are logged to a tracking server."""

from __future__ import annotations

import pytest

from hvd_cluster.data.store import Store
from hvd_cluster.estimators import KerasEstimator, LightningEstimator, TorchEstimator
from hvd_cluster.estimators.view.tracking import _params


@pytest.mark.parametrize("as_store", [True, False])
def test_the_credentials_in_a_stores_url_are_not_shown(as_store):
    url = "s3://key:hush@bucket/work?token=hush"
    store = Store.create(url, storage_options={"secret": "hush"}) if as_store else url
    assert _params(TorchEstimator(store=store, epochs=3)) == {"store": "s3://bucket/work", "epochs": "3"}


def test_a_local_path_is_shown_unchanged(tmp_path):
    assert _params(TorchEstimator(store=tmp_path))["store"] == str(tmp_path)


def test_only_names_of_variables_and_arguments_are_shown():
    keras = KerasEstimator(backend_env={"TF_X": "1", "AWS_SECRET_ACCESS_KEY": "hush"})
    assert _params(keras)["backend_env"] == "AWS_SECRET_ACCESS_KEY, TF_X"
    assert _params(LightningEstimator(trainer_args={"plugins": "hush"}))["trainer_args"] == "plugins"
