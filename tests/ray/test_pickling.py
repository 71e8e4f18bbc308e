"""Objects of Ray's in calls: in arguments, closures, results, exceptions and in what workers log."""

from __future__ import annotations

import gc
import importlib.util
import pickle
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from ray_clusters import TestCluster
from turns import Turn

from hvd_cluster.errors import WorkerFailedError
from hvd_cluster.ray import RayExecutor, pickling, ray_logger, run


@dataclass
class Holder:
    """A value of the user's with a reference in it."""

    refs: dict[str, Any]


class RefError(Exception):
    def __init__(self, ref: Any) -> None:
        super().__init__("with a reference")
        self.ref = ref


@pytest.fixture(scope="module")
def two(_ray_cluster: TestCluster) -> Iterator[RayExecutor]:
    with RayExecutor(RayExecutor.create_settings(timeout_s=100), num_workers=2) as executor:
        yield executor


def get(value: Any) -> Any:
    import ray

    return ray.get(value.refs["x"] if isinstance(value, Holder) else value)


def num_refs(ref: Any) -> int:
    import ray

    counts = ray._private.worker.global_worker.core_worker.get_all_reference_counts()
    return int(counts.get(ref.hex().encode(), counts.get(ref.hex(), {"local": 0}))["local"])


@pytest.mark.parametrize("size", [1, 300_000])
def test_a_reference_in_a_call_is_readable_on_every_worker(two: RayExecutor, size: int) -> None:
    import ray

    ref = ray.put(bytes(size))
    assert [len(each) for each in two.run(lambda: ray.get(ref))] == [size, size]
    assert [len(each) for each in two.run(get, [ref])] == [size, size]
    assert [len(each) for each in two.run(get, kwargs={"value": Holder({"x": ref})})] == [size, size]
    assert [len(each) for each in two.execute(lambda _: ray.get(ref))] == [size, size]
    assert len(two.execute_single(lambda _: ray.get(ref))) == size
    assert [len(each) for each in ray.get(two.run_remote(get, [ref]))] == [size, size]


def test_a_reference_comes_back_as_itself_and_one_that_a_worker_made_is_readable(two: RayExecutor) -> None:
    import ray

    ref = ray.put("here")
    assert two.run(lambda: Holder({"x": ref}))[1].refs["x"] == ref
    made = two.run(lambda: [ray.put(ray_rank()), ray.put("b")])
    gc.collect()
    assert [ray.get(each) for each in made] == [[0, "b"], [1, "b"]]


def ray_rank() -> int:
    import os

    return int(os.environ["HOROVOD_RANK"])


def test_a_reference_in_an_exception_and_in_a_log_reaches_the_driver(two: RayExecutor) -> None:
    import ray

    ref = ray.put(7)

    def fails() -> None:
        raise RefError(ref)

    with pytest.raises(WorkerFailedError) as caught:
        two.run(fails)
    assert ray.get(caught.value.__cause__.ref) == 7  # type: ignore[union-attr]
    heard: list[Any] = []
    two.run(lambda: ray_logger.log({"ref": ray.put(8), "old": ref}), callbacks=[lambda info: heard.append(info)])
    assert [ray.get([info["ref"], info["old"]]) for info in heard] == [[8, 7], [8, 7]]


@pytest.mark.usefixtures("_ray_cluster")
def test_what_workers_stored_outlives_those_that_end_with_their_call() -> None:
    import ray

    ref = ray.put("mine")
    results = run(lambda r: (r, ray.put([ray_rank()])), [ref], num_proc=2)
    assert [result[0] for result in results] == [ref, ref]
    assert ray.get([result[1] for result in results]) == [[0], [1]]


@pytest.mark.usefixtures("_ray_cluster")
def test_an_elastic_job_takes_and_returns_references() -> None:
    import ray

    ref = ray.put(5)
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=100), min_workers=2, max_workers=2)
    executor.start()
    results = executor.run(lambda: ray.put(ray.get(ref) + ray_rank()))
    executor.shutdown()
    assert sorted(ray.get(results)) == [5, 6]


def test_actors_and_values_with_a_serializer_of_rays_travel(two: RayExecutor) -> None:
    import ray

    class Counter:
        def __init__(self) -> None:
            self.total = 0

        def add(self, n: int) -> int:
            self.total += n
            return self.total

    class Guarded:
        def __init__(self) -> None:
            self.lock, self.value = threading.Lock(), 3

    counter = ray.remote(Counter).options(num_cpus=0).remote()
    two.run(lambda c: ray.get(c.add.remote(2)), [counter])
    assert ray.get(counter.add.remote(0)) == 4
    ray.util.register_serializer(Guarded, serializer=lambda g: g.value, deserializer=lambda value: value)
    try:
        assert two.run(lambda x: x, [Guarded()]) == [3, 3]
    finally:
        ray.util.deregister_serializer(Guarded)
        ray.kill(counter)


def test_references_and_actors_travel_between_ranks(two: RayExecutor) -> None:
    import ray

    class Counter:
        def value(self) -> int:
            return 4

    def fn(counter: Any) -> tuple[Any, ...]:
        import hvd_cluster.torch as hvd

        hvd.init()
        mine = ray.put(bytes(200_000 + hvd.rank()))
        sent = hvd.broadcast_object(Holder({"x": mine, "actor": counter if hvd.rank() == 1 else None}), root_rank=1)
        every = hvd.allgather_object([mine])
        found = [len(ray.get(sent.refs["x"])), ray.get(sent.refs["actor"].value.remote())]
        found += [len(ray.get(each)) for (each,) in every]
        hvd.shutdown()
        return tuple(found)

    counter = ray.remote(Counter).options(num_cpus=0).remote()
    assert two.run(fn, [counter]) == [(200_001, 4, 200_000, 200_001)] * 2
    ray.kill(counter)


def test_a_call_does_not_keep_what_it_referred_to(two: RayExecutor) -> None:
    import ray

    ref = ray.put(bytes(200_000))
    two.run(get, [ref])
    gc.collect()
    deadline_s = time.monotonic() + 20
    while num_refs(ref) > 1:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_what_is_registered_with_cloudpickle_is_pickled_by_value_in_two_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = importlib.util.spec_from_file_location("rays_cloudpickle", cloudpickle.cloudpickle.__file__)
    assert spec is not None
    assert spec.loader is not None
    rays = importlib.util.module_from_spec(spec)  # in the place of Ray's own copy
    monkeypatch.setitem(sys.modules, rays.__name__, rays)
    spec.loader.exec_module(rays)
    monkeypatch.setattr(pickling, "load_ray", lambda: SimpleNamespace(cloudpickle=rays))
    module = ModuleType("of_two")
    exec("class Config: pass", module.__dict__)
    turns = [Turn(), Turn()]
    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as threads:
        patch.setitem(sys.modules, "of_two", module)
        cloudpickle.register_pickle_by_value(module)
        try:
            packing = []
            for turn in turns:
                packing.append(threads.submit(pickling.dumps_out_of_band, (turn, module.Config())))
                assert turn.has_begun.wait(60)
            for turn, one in zip(turns, packing, strict=True):
                turn.may_end.set()
                one.exception()  # it has ended
        finally:
            cloudpickle.unregister_pickle_by_value(module)
        assert rays.list_registry_pickle_by_value() == set()
    assert [type(pickle.loads(one.result())[1]).__name__ for one in packing] == ["Config"] * 2
