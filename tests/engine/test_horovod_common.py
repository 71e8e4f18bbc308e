from __future__ import annotations

import os

import pytest

import hvd_cluster.torch as hvd
from hvd_cluster.engine import horovod_common as common


def test_env_sets_variables_and_restores_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_TEST_A", "before")
    monkeypatch.setenv("HVD_TEST_C", "kept")
    with common.env(HVD_TEST_A="within", HVD_TEST_B="new", HVD_TEST_C=None):
        assert [os.environ[f"HVD_TEST_{name}"] for name in "ABC"] == ["within", "new", "kept"]
    assert os.environ["HVD_TEST_A"] == "before"
    assert "HVD_TEST_B" not in os.environ


def test_questions_about_the_build_take_verbose() -> None:
    asked = (common.gloo_built, common.mpi_built, common.ddl_built, common.ccl_built, common.cuda_built)
    assert [bool(ask(verbose=True)) for ask in asked] == [bool(getattr(hvd, ask.__name__)()) for ask in asked]
    assert common.nccl_built(verbose=True) == hvd.nccl_built()


def test_a_framework_that_is_not_installed_is_not_an_extension() -> None:
    assert common.extension_available("torch")
    common.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    assert not common.gpu_available("no_such_framework")
    with pytest.raises(ImportError, match=r"horovod\.no_such_framework needs no_such_framework"):
        common.check_extension("horovod.no_such_framework", "HOROVOD_WITH_NOTHING", __file__)


@pytest.mark.parametrize(
    ("version", "target", "expected"),
    [
        ("2.13.0+cpu", "2.4.0", True),
        ("2.4", "2.4.0", True),
        ("2.4.0rc1", "2.4.0", False),
        ("2.4.0", "2.4.0rc1", True),
        ("1.9.1", "1.10", False),
    ],
)
def test_versions_are_compared_by_number(version: str, target: str, expected: bool) -> None:
    assert common.is_version_greater_equal_than(version, target) is expected


def test_what_is_not_a_version_is_refused() -> None:
    with pytest.raises(ValueError, match="'newest' is not a version"):
        common.is_version_greater_equal_than("newest", "1.0")


def test_a_list_is_split_in_order_with_the_longer_parts_first() -> None:
    assert common.split_list([0, 1, 2, 3, 4], 3) == [[0, 1], [2, 3], [4]]
    assert common.split_list([0], 2) == [[0], []]


def test_the_basics_object_answers_as_the_functions_do() -> None:
    basics = common.HorovodBasics(__file__, "mpi_lib")
    basics.init()
    try:
        assert (basics.rank(), basics.size(), basics.Sum) == (0, 1, hvd.Sum)
        assert basics._get_process_set_ids_and_ranks() == {0: [0]}
        assert common._temp_process_set_object(0) is hvd.global_process_set
        with pytest.raises(ValueError, match="process set 7 does not exist"):
            common._temp_process_set_object(7)
    finally:
        basics.shutdown()
