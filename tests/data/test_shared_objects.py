"""Functions that use objects which several threads would share, and functions that do not."""

from __future__ import annotations

import importlib
import posixpath
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_cluster.data.preprocessing import Preprocess
from hvd_cluster.data.shared_objects import uses_objects

OTHER = """
class Tokenizer:
    def enc(self, text):
        return len(text)


tok = Tokenizer()


def encode(text):
    return tok.enc(text)


def size(text):
    return len(text)
"""

SOURCE = """
import math
import re

import numpy as np
import torch
from shared_objects_other import Tokenizer, size
from shared_objects_other import encode as other_encode

import shared_objects_other

tok = Tokenizer()
both = (tok, tok)
method = tok.enc
WORD = re.compile("[a-z]+")
START = np.datetime64("2020-01-01")
SCALES = (1.0, 2.0)


def in_comprehension(batch):
    return np.array([[tok.enc(t)] for t in batch["x"]])


def in_lambda(batch):
    return np.array(list(map(lambda t: tok.enc(t), batch["x"])))


def helper(texts):
    return inner(texts)


def inner(texts):
    return [tok.enc(t) for t in texts]


def through_functions(batch):
    return np.array(helper(batch["x"]))


def through_a_module(batch):
    return shared_objects_other.tok.enc(batch["x"])


def through_a_function_of_another_module(batch):
    return [other_encode(t) for t in batch["x"]]


def through_an_import(batch):
    from shared_objects_other import tok

    return tok.enc(batch["x"])


class Encoder:
    def __call__(self, batch):
        return tok.enc(batch["x"])


def through_a_class(batch):
    return Encoder()(batch)


def through_a_default(batch, *, tokenizer=tok):
    return tokenizer.enc(batch["x"])


def through_a_tuple(batch):
    return both[0].enc(batch["x"])


def through_a_bound_method(batch):
    return method(batch["x"])


def wrapped(one):
    def call(batch):
        return one.enc(batch["x"])

    call.__name__ = call.__qualname__ = "through_a_closure"
    return call


through_a_closure = wrapped(tok)


def loop(batch):
    return loop(batch) if len(batch) > 9 else size(batch["x"])


def harmless(batch):
    lengths = [math.sqrt(len(WORD.findall(t))) for t in batch["x"]]
    days = (batch["day"] - START) / np.timedelta64(1, "D")
    scaled = np.stack([np.nan_to_num(days) * scale for scale in SCALES])
    return {"a": np.concatenate([scaled, lengths]), "b": torch.zeros(2, dtype=torch.float32), "c": loop(batch)}
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder: Path = tmp_path_factory.mktemp("modules")
    (folder / "shared_objects_other.py").write_text(OTHER)
    (folder / "shared_objects_users.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(folder))
        yield importlib.import_module("shared_objects_users")
    for name in ("shared_objects_other", "shared_objects_users"):
        del sys.modules[name]


@pytest.mark.parametrize(
    "name",
    [
        "in_comprehension", "in_lambda", "through_functions", "through_a_module",
        "through_a_function_of_another_module", "through_an_import", "through_a_class", "through_a_default",
        "through_a_tuple", "through_a_bound_method", "through_a_closure",
    ],
)  # fmt: skip
def test_an_object_is_found_wherever_the_function_gets_it(module: Any, name: str) -> None:
    assert uses_objects(getattr(module, name))
    assert Preprocess(fn=getattr(module, name), columns=("x",)).copied() is None


def test_constants_modules_and_functions_of_libraries_count_as_safe(module: Any) -> None:
    assert not uses_objects(module.harmless)
    assert Preprocess(fn=module.harmless, columns=("x",)).copied() is not None
    assert not uses_objects(posixpath.basename)
    assert not uses_objects(len)
    assert uses_objects(shutil.get_archive_formats)
