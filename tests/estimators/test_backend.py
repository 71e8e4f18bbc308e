from __future__ import annotations

import inspect
import os
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from hvd_cluster.errors import LaunchError
from hvd_cluster.estimators import Backend, LocalBackend, SparkBackend, TorchEstimator
from hvd_cluster.estimators.backend import as_backend, run_on
from hvd_cluster.estimators.ray.backend import RayBackend
from hvd_cluster.launch import local, progress


def where(base):
    progress.report(step=base)
    return base + int(os.environ["RANK"]), os.environ.get("COLOUR")


def test_local_workers_get_the_environment_and_report():
    seen = []
    backend = LocalBackend(2, env={"COLOUR": "green", "RED": "1"})
    assert backend.num_processes() == 2
    assert run_on(backend, _where(), (10,), lambda rank, fields: seen.append((rank, fields["step"]))) == [
        (10, "green"),
        (11, "green"),
    ]
    assert sorted(seen) == [(0, 10), (1, 10)]


class Cluster(SparkBackend):
    """Its tasks are processes of this machine."""

    def _launch(self):
        launch = LocalBackend(1)._launch()
        taken = inspect.signature(launch).parameters
        return lambda *args, **more: launch(*args, **{name: more[name] for name in more if name in taken})

    def _session(self):
        return SimpleNamespace(spark=self)


def test_a_module_that_a_function_imports_when_it_is_called_is_missed_before_data_is_written(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text(
        "import os\nif 'RANK' in os.environ:\n    raise ModuleNotFoundError('absent', name='only_here')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def imports(batch):
        import only_here

        return only_here

    backend = Cluster(1)
    backend.check_unpickles("fit", {"preprocess": imports})  # it was not called here, so it may not need the module
    imports({})
    with pytest.raises(LaunchError, match=r"(?s)only_here.*install.*No data has been written"):
        backend.check_unpickles("fit", {"preprocess": imports})


@pytest.mark.parametrize("verbose", [0, 1])
def test_verbose_0_drops_the_output_of_workers(capfd, verbose):
    LocalBackend(1, verbose=verbose).run(lambda: print("hello from a worker"))
    assert ("hello from a worker" in capfd.readouterr().out) is bool(verbose)


@pytest.mark.parametrize("backend", [LocalBackend, RayBackend, SparkBackend])
def test_an_argument_that_the_launcher_does_not_have_is_refused_at_once(backend):
    with pytest.raises(TypeError, match=rf"{backend.__name__} has no argument num_workers \(did you mean num_proc\?\)"):
        backend(num_workers=2)


@pytest.mark.parametrize("backend", [LocalBackend, RayBackend, SparkBackend])
def test_a_backend_has_the_arguments_of_its_launcher_and_their_defaults(backend):
    given_by_fits = {"fn", "args", "kwargs", "rows"}
    launcher = inspect.signature(backend()._launch()).parameters.values()
    assert {each.name: each.default for each in inspect.signature(backend).parameters.values()} == {
        each.name: each.default for each in launcher if each.name not in given_by_fits
    }
    assert list(inspect.signature(backend).parameters)[:2] == ["num_proc", "env"]


def test_arguments_of_a_backend_reach_its_launcher(monkeypatch):
    backend = LocalBackend(2, {"A": "1"}, verbose=0, stdout=None)
    monkeypatch.setattr(local, "run", lambda *call, **given: [call, given])
    call, given = backend.run(len, ("x",), on_event=print)
    assert call == (len, ("x",), {})
    defaults = {"prefix_output_with_timestamp": False}
    assert given == {"num_proc": 2, "env": {"A": "1"}, "verbose": 0, "on_event": print, **defaults}


def test_a_custom_backend_needs_no_on_event():
    class Here(Backend):
        def run(self, fn, args=(), kwargs=None, env=None):
            return [fn(*args)]

        def num_processes(self):
            return 1

    assert run_on(Here(), lambda x: x + 1, (1,), lambda rank, fields: None) == [2]


def test_any_object_with_run_and_num_processes_is_a_backend():
    class Own:
        num_proc = 3

        def run(self, fn, args=(), kwargs=None, env=None):
            return [fn(*args)] * self.num_proc

        def num_processes(self):
            return self.num_proc

        def check(self):
            raise LaunchError("no room")

    own = Own()
    backend = as_backend(own)
    assert isinstance(backend, Backend)
    assert as_backend(backend) is backend
    own.num_proc = 2
    assert (backend.num_processes(), backend.where(), backend.is_far) == (2, "Own", False)
    assert run_on(backend, lambda x: x + 1, (1,), lambda rank, fields: None) == [2, 2]
    with pytest.raises(LaunchError, match="no room"):
        backend.check_again()
    with pytest.raises(TypeError, match="num_processes"):
        as_backend(object())


def test_the_backend_is_checked_before_the_data_is_written(frame, tmp_path):
    class Full(Backend):
        def run(self, fn, args=(), kwargs=None, env=None):
            raise AssertionError

        def num_processes(self):
            return 2

        def check(self):
            raise LaunchError("no room")

    net = torch.nn.Linear(4, 1)
    given = {"optimizer": torch.optim.SGD(net.parameters(), lr=0.1), "loss": F.mse_loss, "store": tmp_path}
    fit = TorchEstimator(model=net, backend=Full(), feature_cols=["x"], label_cols=["a"], verbose=0, **given)
    with pytest.raises(LaunchError, match="no room"):
        fit.fit(frame.assign(a=None))  # nulls are found when the data is written


def test_a_subclass_can_read_the_arguments_of_the_spark_backend():
    backend = SparkBackend(3, env={"A": "1"}, stdout=None, verbose=0)
    defaults = {"prefix_output_with_timestamp": False, "workers_per_task": 1}
    assert (backend._num_proc, backend._env, backend._kwargs) == (3, {"A": "1"}, {"verbose": 0, **defaults})
    assert backend.num_processes() == 3


@pytest.mark.parametrize("kind", [LocalBackend, SparkBackend])
def test_zero_workers_are_rejected_at_once(kind):
    with pytest.raises(ValueError, match="num_proc=0 must be a whole number of at least 1"):
        kind(0)


def _where():
    """The function, by value: the workers cannot import this test module."""
    return lambda base: where(base)
