from __future__ import annotations

import functools
import importlib
import socket
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

import cloudpickle
import pytest
from turns import Turn

from hvd_cluster.errors import LaunchError
from hvd_cluster.launch.call import pack, unpack
from hvd_cluster.spark.task_function import MODULE_REMEDY

LOCK = threading.Lock()


class OwnLoader(Loader):
    """Loads a module in its own way, as finders for notebooks do."""

    def __init__(self, name: str, path: str) -> None:
        self._code = Path(path).read_text()

    def create_module(self, spec: ModuleSpec) -> None: ...

    def exec_module(self, module: ModuleType) -> None:
        exec(self._code, module.__dict__)


class Model:
    def __init__(self) -> None:
        self.weights = [1.0]
        self.lock = threading.Lock()

    def fit(self) -> None: ...


def uses_global() -> object:
    return LOCK


uses_global.__module__ = "__main__"  # a function of a script


def test_arguments_closures_and_partials_come_through() -> None:
    base = 10
    assert unpack(pack(lambda a, b: base + a + b, (1,), {"b": 2}))() == 13
    assert unpack(pack(functools.partial(divmod, 7), (2,)))() == (3, 1)


def test_a_captured_variable_that_cannot_be_pickled_is_named_with_its_type_and_the_remedy() -> None:
    model = Model()
    other = [1, {"deep": threading.Lock()}]
    with pytest.raises(LaunchError) as caught:
        pack(lambda: (model, other))
    text = str(caught.value)
    assert "captured variable 'model', attribute 'lock' of" in text
    assert "Model: _thread.lock" in text
    assert "captured variable 'other', item 1, item 'deep': _thread.lock" in text
    assert "weights" not in text
    assert "Create it inside the function, or pass what it is made from" in text
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "where"),
    [
        (print, (1, threading.Lock()), {}, "argument 1: _thread.lock"),
        (print, (), {"file": threading.Lock()}, "argument 'file': _thread.lock"),
        (uses_global, (), {}, "global variable 'LOCK': _thread.lock"),
        (functools.partial(print, threading.Lock()), (), {}, "argument 0 of the partial: _thread.lock"),
        (Model().fit, (), {}, "the object that the method is bound to, attribute 'lock' of"),
        (lambda x=LOCK: x, (), {}, "a default argument: _thread.lock"),
    ],
)
def test_whatever_cannot_be_pickled_is_found_where_it_is(fn: object, args: tuple, kwargs: dict, where: str) -> None:
    with pytest.raises(LaunchError) as caught:
        pack(fn, args, kwargs, shared_path=False)  # type: ignore[arg-type]
    assert where in str(caught.value)


def test_an_open_file_and_a_generator_are_named_by_their_variables(tmp_path: Path) -> None:
    rows = (row for row in range(3))
    with (tmp_path / "log").open("w") as log, pytest.raises(LaunchError) as caught:
        pack(lambda: (log, rows))
    assert "captured variable 'log': _io.TextIOWrapper" in str(caught.value)
    assert "captured variable 'rows': generator" in str(caught.value)


def test_what_is_not_a_function_is_refused() -> None:
    with pytest.raises(TypeError, match="function that the workers can call, not int"):
        pack(3)  # type: ignore[arg-type]


def test_functions_of_a_module_that_the_workers_cannot_import_travel_by_value(tmp_path: Path) -> None:
    packed = tmp_path / "call"
    packed.write_bytes(pack(helper_caller, (2,), shared_path=False))
    code = f"from hvd_cluster.launch.call import unpack; print(unpack(open({str(packed)!r}, 'rb').read())())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (result.stdout, result.stderr) == ("6\n", "")
    assert __name__ not in cloudpickle.list_registry_pickle_by_value()


def helper(x: int) -> int:
    return x * 3


def helper_caller(x: int) -> int:
    return helper(x)


def test_a_function_that_uses_a_lock_of_its_module_travels_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "locked.py").write_text(
        "import threading\nLOCK = threading.Lock()\ndef fn(x):\n    with LOCK:\n        return x\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    locked = importlib.import_module("locked")
    try:
        assert unpack(pack(locked.fn, (2,), shared_path=False))() == 2
        with pytest.raises(LaunchError, match=r"(?s)'LOCK': _thread.lock.*argument 0: _thread.lock"):
            pack(locked.fn, (LOCK,), shared_path=False)
    finally:
        del sys.modules["locked"]


def test_functions_of_an_importable_module_travel_by_name() -> None:
    assert len(pack(textwrap.dedent, shared_path=False)) < 500


@pytest.mark.parametrize(("loader", "by_name"), [(SourceFileLoader, True), (OwnLoader, False)])
def test_a_module_of_an_editable_install_travels_by_name(
    loader: type[SourceFileLoader], by_name: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "edited.py"
    file.write_text("def fn(): return NUMBER\nNUMBER = 1")

    class EditableFinder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            return spec_from_file_location(name, file, loader=loader(name, str(file))) if name == "edited" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, EditableFinder])
    edited = importlib.import_module("edited")
    try:
        fn = unpack(pack(edited.fn))
        edited.NUMBER = 2
        assert fn() == (2 if by_name else 1)
    finally:
        del sys.modules["edited"]


def test_a_worker_without_a_module_says_which() -> None:
    module = ModuleType("vanishing")
    sys.modules["vanishing"] = module
    try:
        exec("class Thing: pass", module.__dict__)
        packed = pack(print, (module.Thing(),))
    finally:
        del sys.modules["vanishing"]
    with pytest.raises(LaunchError, match="cannot be rebuilt on the worker.*No module named 'vanishing'"):
        unpack(packed)


def lacking(pack: object, monkeypatch: pytest.MonkeyPatch, *, whole: bool) -> str:
    """The error of a worker without the module ``netmod``, or with another version of it."""
    module = ModuleType("netmod")
    exec("class Net: pass", module.__dict__)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "netmod", module)
        packed = pack(print, (module.Net(),))  # type: ignore[operator]
    with monkeypatch.context() as patch:
        if not whole:
            patch.setitem(sys.modules, "netmod", ModuleType("netmod"))
        with pytest.raises(LaunchError) as caught:
            unpack(packed)
    assert isinstance(caught.value.__cause__, ImportError)
    return str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize("whole", [True, False], ids=["module", "name"])
@pytest.mark.parametrize("launcher", ["hosts", "spark", "ray"])
def test_a_missing_module_is_named_with_the_remedy_of_its_launcher(
    launcher: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if launcher == "ray":
        pytest.importorskip("ray")
        from hvd_cluster.ray.adapter import packed

        text = lacking(packed, monkeypatch, whole=whole)
        assert "'py_modules'" in text
        assert "'working_dir'" in text
    elif launcher == "spark":
        text = lacking(functools.partial(pack, remedy=MODULE_REMEDY), monkeypatch, whole=whole)
        assert "spark.addArtifacts('FILE.py', pyfile=True)" in text
        assert "SparkContext.addPyFile" in text
    else:
        text = lacking(pack, monkeypatch, whole=whole)
        assert "PYTHONPATH" in text
    assert f"{sys.executable} on {socket.gethostname()} cannot import 'netmod'" in text
    assert "cloudpickle.register_pickle_by_value(netmod)" in text
    assert ("No module named 'netmod'" if whole else "module 'netmod' has no 'Net'") in text


def test_the_source_of_a_notebook_cell_comes_along_for_tracebacks() -> None:
    import linecache

    cell, source = "<ipython-input-7>", "def in_cell():\n    raise ValueError('x')  # the line\n"
    linecache.cache[cell] = (len(source), None, source.splitlines(keepends=True), cell)
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec(compile(source, cell, "exec"), namespace)
    packed = pack(namespace["in_cell"])  # type: ignore[arg-type]
    del linecache.cache[cell]
    try:
        unpack(packed)
        assert linecache.getline(cell, 2).strip().endswith("# the line")
    finally:
        linecache.cache.pop(cell, None)


@pytest.mark.parametrize("is_registered", [False, True], ids=["", "by the user"])
def test_two_threads_pack_calls_of_one_module_by_value(is_registered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("of_two")
    module.__file__ = "/nowhere/of_two.py"
    exec("class Config: pass\ndef last(*args): return args[-1]", module.__dict__)
    turns = [Turn(), Turn()]
    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as threads:
        patch.setitem(sys.modules, "of_two", module)
        if is_registered:
            cloudpickle.register_pickle_by_value(module)
        packing = []
        for turn in turns:
            packing.append(threads.submit(pack, module.last, (turn, module.Config()), shared_path=False))
            assert turn.has_begun.wait(60)
        for turn, one in zip(turns, packing, strict=True):
            turn.may_end.set()
            one.exception()  # it has ended
        assert ("of_two" in cloudpickle.list_registry_pickle_by_value()) is is_registered
        if is_registered:
            cloudpickle.unregister_pickle_by_value(module)
    assert [type(unpack(one.result())()).__name__ for one in packing] == ["Config"] * 2


@pytest.mark.parametrize("args", [3, "abc", None])
def test_arguments_that_are_not_a_sequence_are_refused(args: object) -> None:
    with pytest.raises(TypeError, match=rf"args={args!r} must be a list or tuple of the function's arguments"):
        pack(len, args)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="kwargs='x' must be a dict"):
        pack(len, (), "x")  # type: ignore[arg-type]
