from __future__ import annotations

import inspect
import pickle
from abc import ABC

import pytest

import hvd_cluster.runner.http.http_server as old
from hvd_cluster.oldpaths.absent import AbsentFeatureError

SAYS = r"hvd_cluster does not have horovod\.runner\.http\.http_server\.RendezvousServer, .*meet by themselves"


def test_an_absent_name_imports_as_one_object_and_explains_itself_when_it_is_called() -> None:
    from hvd_cluster.runner.http.http_server import RendezvousServer

    assert RendezvousServer is old.RendezvousServer
    with pytest.raises(NotImplementedError, match=SAYS):
        RendezvousServer(verbose=True)


def test_an_attribute_of_an_absent_name_explains_too_and_can_be_probed() -> None:
    with pytest.raises(AbsentFeatureError, match=SAYS):
        _ = old.RendezvousServer.port
    with pytest.raises(AbsentFeatureError, match=SAYS):
        old.RendezvousServer.port = 3
    assert not hasattr(old.RendezvousServer, "port")
    assert getattr(old.RendezvousServer, "port", 7) == 7
    assert inspect.isclass(old.RendezvousServer)


def test_a_class_over_an_absent_name_is_defined_and_explains_itself_when_it_is_instantiated() -> None:
    class Server(old.RendezvousServer, ABC):  # type: ignore[name-defined,misc]
        port = 3

    assert Server.port == 3
    assert not isinstance(3, Server)
    with pytest.raises(AbsentFeatureError, match=SAYS):
        Server()


def test_an_absent_name_pickles_by_its_place() -> None:
    assert pickle.loads(pickle.dumps(old.RendezvousServer)) is old.RendezvousServer


def test_tab_completion_shows_what_is_here_only() -> None:
    import hvd_cluster.runner.elastic.worker as worker

    assert "HostUpdateResult" in dir(worker)
    assert "WorkerNotificationManager" not in dir(worker)
