from __future__ import annotations

import inspect
import io
import warnings
from typing import Any

import pytest

import hvd_cluster
from hvd_cluster.launch import local
from hvd_cluster.launch.arguments import none_is_default, renamed


@none_is_default
def function(a: int, b: int = 2, *more: int, c: Any = "c", d: Any = None, e: int = 0, **others: Any) -> tuple[Any, ...]:
    return a, b, more, c, d, e, others


def test_none_stands_for_a_default_wherever_it_is_given() -> None:
    assert function(1, None, 3, c=None, d=None, e=None, f=None) == (1, 2, (3,), "c", None, 0, {"f": None})  # type: ignore[arg-type]
    assert function(1, None) == (1, 2, (), "c", None, 0, {})  # type: ignore[arg-type]
    assert function(1, 0, c=0, d=4) == (1, 0, (), 0, 4, 0, {})
    assert list(inspect.signature(function).parameters) == ["a", "b", "more", "c", "d", "e", "others"]
    with pytest.raises(TypeError, match=r"function\(\) missing 1 required positional argument: 'a'"):
        function()  # type: ignore[call-arg]


def test_an_old_name_warns_where_it_is_used() -> None:
    @none_is_default
    def run(np: int | None = None, num_proc: int | None = None) -> Any:
        return renamed("np", np, "num_proc", num_proc)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [run(num_proc=2), run(np=3)] == [2, 3]
    assert [(each.filename, str(each.message)) for each in caught] == [(__file__, "np is deprecated, use num_proc")]


def nones(run: Any, **needed: Any) -> dict[str, Any]:
    """None for each argument that may be left out, but those that are needed here."""
    parameters = list(inspect.signature(run).parameters.values())[1:]
    return {**{each.name: None for each in parameters}, **needed}


def test_run_takes_none_for_every_argument(capfd: pytest.CaptureFixture[str]) -> None:
    assert hvd_cluster.run(print, **nones(hvd_cluster.run)) == [None]
    assert capfd.readouterr().out == "[0]<stdout>:\n"


def test_run_takes_horovods_defaults() -> None:
    given = nones(hvd_cluster.run, args=(), num_proc=1, env={}, prefix_output_with_timestamp=False)
    assert hvd_cluster.run(int, **given) == [0]


def test_the_local_launcher_takes_none_for_every_argument() -> None:
    assert local.run(int, **nones(local.run, stdout=io.StringIO())) == [0]
