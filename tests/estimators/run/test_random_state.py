"""The random generators of a process, whatever NumPy's bit generator is."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from hvd_cluster.estimators.run.checkpoint import packed, unpacked
from hvd_cluster.estimators.run.random_state import capture, restore, seed_all, set_aside

BIT_GENERATORS = ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"]


class Own(np.random.PCG64):
    """A bit generator that NumPy does not have."""


@pytest.fixture(autouse=True)
def as_before():
    kept, generator = np.random.get_state(), np.random.get_bit_generator()
    yield
    np.random.set_bit_generator(generator)
    np.random.set_state(kept)


def drawn():
    return [
        np.random.normal(),
        *np.random.randint(9, size=3),
        random.gauss(0, 1),
        random.random(),
        torch.rand(1).item(),
    ]


@pytest.mark.parametrize("name", BIT_GENERATORS)
def test_a_checkpoint_restores_every_bit_generator_of_numpy(name):
    np.random.set_bit_generator(getattr(np.random, name)(1))
    drawn()
    blob = packed(capture())
    expected = drawn()
    np.random.set_bit_generator(np.random.MT19937(2))  # another process
    seed_all(1, 2, 3)
    restore(unpacked(blob))
    assert drawn() == expected


@pytest.mark.parametrize("inside", [None, np.random.SFC64])
@pytest.mark.parametrize("cls", [*(getattr(np.random, name) for name in BIT_GENERATORS), Own])
def test_generators_that_are_set_aside_continue(cls, inside):
    np.random.set_bit_generator(cls(1))
    drawn()
    before = capture()
    expected = drawn()
    restore(before)
    numbers = []
    for _ in range(2):
        with set_aside(7):
            numbers.append(drawn())
            if inside is not None and cls is not Own:
                np.random.set_bit_generator(inside(3))
    assert numbers[0] == numbers[1]
    assert drawn() == expected
