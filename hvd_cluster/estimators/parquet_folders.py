"""Parquet that lies at a store's paths for training and validation data already, as a data set to fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hvd_cluster.data.dataset import Dataset
from hvd_cluster.data.materializing import materialize
from hvd_cluster.data.store import Store
from hvd_cluster.estimators.frames import parquet_columns


def column_names(store: Store, dataset_idx: int | str | None) -> list[str]:
    """The columns of the training data.

    Raises:
        DataError: no Parquet can be read there.
    """
    path = store.get_train_data_path(dataset_idx)
    return parquet_columns(store, path, f"{path!r}, where the training data should be")


def dataset(store: Store, dataset_idx: int | str | None, columns: Sequence[str], num_proc: int) -> Dataset:
    """The training data, and the validation data where there is a folder of that. Nothing is written or deleted.

    Raises:
        DataError: the data cannot be read, or holds nulls or ragged lists.
    """
    train = materialize(store.get_train_data_path(dataset_idx), store, columns=columns, num_proc=num_proc)
    _, held_out = part_dirs(store, dataset_idx)
    if held_out is None:
        return train
    validation = materialize(held_out, store, columns=columns, num_proc=num_proc)
    return dataclasses.replace(train, validation=validation.train)


def part_dirs(store: Store, dataset_idx: int | str | None) -> tuple[str, str | None]:
    """The folders of the training data and of the validation data, None where there is no such folder."""
    held_out = store.get_val_data_path(dataset_idx)
    return store.get_train_data_path(dataset_idx), held_out if store.exists(held_out) else None
