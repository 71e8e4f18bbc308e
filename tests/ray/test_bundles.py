"""Inside of a placement group: its bundles, and no others, are where workers go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ray_clusters import TestCluster

from hvd_cluster.errors import NotEnoughSlotsError, StartTimeoutError
from hvd_cluster.ray import RayExecutor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def group(ray_cluster: TestCluster) -> Iterator[Any]:
    """Bundles of 1, 1.5 and 1 CPU, the first two on one node."""
    import ray
    from ray.util import placement_group, placement_group_table, remove_placement_group

    group = placement_group([{"CPU": 1}, {"CPU": 1.5}, {"CPU": 1}], strategy="SPREAD")
    ray.get(group.ready())
    assert len(set(placement_group_table(group)["bundles_to_node_id"].values())) == 2
    yield group
    remove_placement_group(group)


def inside(group: Any, bundle: int, fn: Callable[..., Any], *args: Any, cpus: float = 0.5) -> Any:
    """What ``fn`` returns to a program that takes half a CPU of that bundle."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    task = ray.remote(fn).options(num_cpus=cpus, scheduling_strategy=place, max_retries=0)
    return ray.get(task.remote(*args))


def places(**arguments: Any) -> tuple[list[tuple[str, int]], int]:
    """In the program: where each worker of an executor is and in which bundle, and how many groups there are."""
    import ray
    from ray.util import placement_group_table

    def where() -> tuple[str, int]:
        ids = ray._private.worker.global_worker.core_worker.resource_ids()
        bundles = [int(name.split("_")[2]) for name in ids if name.startswith("CPU_group_") and name.count("_") == 3]
        return ray.get_runtime_context().get_node_id(), bundles[0]

    with RayExecutor(RayExecutor.create_settings(timeout_s=100), **arguments) as executor:
        found = executor.run(where)
        return found, sum(one["state"] == "CREATED" for one in placement_group_table().values())


def side_by_side(executors: list[dict[str, Any]], extra: dict[str, Any]) -> tuple[list[int], str, float]:
    """In the program: the bundle of the one worker of each of several executors, and how one more is refused, and when.

    Those before the last one keep their workers while the next one looks for room.
    """
    import threading
    import time
    from contextlib import ExitStack

    import ray

    def where() -> int:
        ids = ray._private.worker.global_worker.core_worker.resource_ids()
        return next(int(name.split("_")[2]) for name in ids if name.startswith("CPU_group_") and name.count("_") == 3)

    def keep(folder: str) -> int:
        """In an elastic job, whose workers live as long as a call."""
        from pathlib import Path

        Path(folder, "bundle").write_text(str(where()))
        while not Path(folder, "over").exists():
            time.sleep(0.1)
        return where()

    def settings() -> Any:
        return RayExecutor.create_settings(timeout_s=30, placement_group_timeout_s=3)

    import tempfile
    from pathlib import Path

    found: list[int] = []
    with ExitStack() as stack:
        for arguments in executors:
            executor = stack.enter_context(RayExecutor(settings(), **arguments))
            if "min_workers" not in arguments:
                found += executor.run(where)
                continue
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            thread = threading.Thread(target=executor.run, args=(keep, [folder]))
            thread.start()  # Ray tells no thread but the program's own in which group that is
            stack.callback(thread.join)
            stack.callback(Path(folder, "over").touch)
            deadline_s = time.monotonic() + 60
            while not Path(folder, "bundle").exists():
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
            time.sleep(0.5)  # it is being written
            found.append(int(Path(folder, "bundle").read_text()))
        began_s = time.monotonic()
        try:
            RayExecutor(settings(), **extra).start()
        except StartTimeoutError as error:
            return found, str(error), time.monotonic() - began_s
    return found, "", 0.0


def refusal(**arguments: Any) -> str:
    try:
        RayExecutor(RayExecutor.create_settings(timeout_s=100), **arguments).start()
    except NotEnoughSlotsError as error:
        return str(error)
    return ""


def test_hosts_are_nodes_of_the_group_with_room_beside_the_program(group: Any) -> None:
    places_here, refusal_here = local(places), local(refusal)
    found, num_groups = inside(group, 1, lambda: places_here(num_hosts=2))
    assert len({node for node, _ in found}) == 2
    assert num_groups == 1
    text = inside(group, 1, lambda: refusal_here(num_hosts=2, num_workers_per_host=2))
    assert "1 CPU, 1.5 CPUs, 1 CPU" in text
    assert "2 on each of 2 nodes are needed, and 1 of its nodes have room for that many" in text


def test_the_room_is_counted_in_the_bundle_where_the_program_is(group: Any) -> None:
    places_here, refusal_here = local(places), local(refusal)
    # In bundle 1 it leaves a whole CPU there; in bundle 0 it would not.
    found, _ = inside(group, 1, lambda: places_here())
    assert sorted(bundle for _, bundle in found) == [0, 1, 2]
    found, _ = inside(group, 0, lambda: places_here())
    assert sorted(bundle for _, bundle in found) == [1, 2]
    assert "with room for 2 workers of 1 CPU each in addition to itself, but 3 are needed" in inside(
        group, 0, lambda: refusal_here(num_workers=3)
    )


def test_an_elastic_job_takes_bundles_of_the_group_and_no_more(group: Any) -> None:
    places_here, refusal_here = local(places), local(refusal)
    found, num_groups = inside(group, 1, lambda: places_here(min_workers=3, max_workers=8))
    assert sorted(bundle for _, bundle in found) == [0, 1, 2]
    assert num_groups == 1
    assert "but min_workers=4 are needed" in inside(group, 1, lambda: refusal_here(min_workers=4))


@pytest.mark.parametrize(
    "executors",
    [
        [{"num_hosts": 1}] * 3,
        [{"num_workers": 1}, {"min_workers": 1, "max_workers": 1}, {"num_hosts": 1}],
    ],
)
def test_executors_in_one_group_take_what_the_others_leave(group: Any, executors: list[dict[str, Any]]) -> None:
    run = local(side_by_side)
    for extra in ({"num_workers": 1}, {"min_workers": 1}):
        found, text, wait_s = inside(group, 1, lambda extra=extra: run(executors=executors, extra=extra))
        assert sorted(found) == [0, 1, 2]
        assert "with room for 3 workers of 1 CPU each in addition to itself. Others use it: there is room for 0" in text
        assert "placement_group_timeout_s" in text
        assert 3 <= wait_s < 20


def test_outside_of_the_group_where_the_program_says_so(group: Any, ray_cluster: TestCluster) -> None:
    places_here = local(places)
    extra = ray_cluster.add_node(num_cpus=1)
    for arguments in ({"num_hosts": 1}, {"num_workers": 1}):
        _, num_groups = inside(
            group, 0, lambda a=arguments: places_here(use_current_placement_group=False, cpus_per_worker=0.5, **a)
        )
        assert num_groups == 2
    ray_cluster.kill_node(extra)
    ray_cluster.await_dead(extra)


def local(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` with its globals by value: Ray's own pickle would look for this module."""
    import cloudpickle

    module = __import__(fn.__module__)
    cloudpickle.register_pickle_by_value(module)
    try:
        blob = cloudpickle.dumps(fn)
    finally:
        cloudpickle.unregister_pickle_by_value(module)

    def call(**arguments: Any) -> Any:
        import pickle

        return pickle.loads(blob)(**arguments)

    return call
