from __future__ import annotations

import os

from hvd_cluster.oldpaths.shim import serves_horovod, shim_env, shim_folder


def test_nothing_is_carried_unless_this_process_answers_for_horovod() -> None:
    assert not serves_horovod()
    assert shim_env({"PYTHONPATH": "/theirs"}) == {}


def test_the_shim_comes_first_and_what_was_there_stays() -> None:
    entries = shim_env({"PYTHONPATH": os.pathsep.join(["/a", "/b"])}, wanted=True)["PYTHONPATH"].split(os.pathsep)
    assert entries == [shim_folder(), "/a", "/b"]


def test_carrying_twice_adds_the_shim_once() -> None:
    once = shim_env({}, wanted=True)
    assert shim_env(once, wanted=True) == once
