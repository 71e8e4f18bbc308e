"""What is said about places for workers: numbers in, sentences and errors out."""

from __future__ import annotations

import pytest

from hvd_cluster.errors import LaunchError, NotEnoughSlotsError
from hvd_cluster.spark import slots
from hvd_cluster.spark.slots import SlotCounts


def test_the_message_says_what_is_needed_what_is_free_and_why() -> None:
    busy = SlotCounts(total=8, busy=2, dynamic_allocation=True)
    assert busy.describe(8).startswith("8 slots needed, 6 free; ")
    assert "2 of 8 are busy" in busy.describe(8)
    assert "dynamic allocation is on" in busy.describe(8)
    assert "each task takes 1 GPU" in SlotCounts(total=2, gpus_per_task=1.0).describe(4)
    assert "an unknown number free" in SlotCounts().describe(4)


def test_tasks_that_wait_although_slots_are_free_wait_for_python() -> None:
    assert "; that is enough, so Spark is still starting Python" in SlotCounts(total=2).describe_wait(2)
    for counts in (SlotCounts(), SlotCounts(total=2, busy=1), SlotCounts(total=1)):
        assert counts.describe_wait(2) == counts.describe(2)


def test_more_workers_than_the_session_can_ever_have_are_refused_with_the_remedy() -> None:
    with pytest.raises(NotEnoughSlotsError, match=r"5 slots needed, 4 free.*local\[8\].*num_proc=4"):
        slots.check(5, SlotCounts(total=4, max_total=4, master="local[4]"))
    with pytest.raises(NotEnoughSlotsError, match=r"spark\.executor\.instances"):
        slots.check(5, SlotCounts(total=2, max_total=4, master="yarn"))


def test_what_may_still_come_is_not_refused() -> None:
    slots.check(5, SlotCounts(total=4))
    slots.check(5, SlotCounts(total=2, max_total=6))
    slots.check(5, SlotCounts())
    slots.check(4, SlotCounts(total=4, busy=4, max_total=4))


def test_dynamic_allocation_is_refused_because_spark_would() -> None:
    with pytest.raises(NotEnoughSlotsError, match=r"8 slots needed, 6 free; dynamic allocation is on"):
        slots.check(8, SlotCounts(total=6, dynamic_allocation=True))
    with pytest.raises(LaunchError, match=r"dynamicAllocation\.enabled=false") as raised:
        slots.check(4, SlotCounts(total=6, dynamic_allocation=True))
    assert not isinstance(raised.value, NotEnoughSlotsError)


def test_jobs_that_are_not_barrier_stages_may_have_dynamic_allocation() -> None:
    slots.check(8, SlotCounts(total=6, dynamic_allocation=True), barrier=False)
    with pytest.raises(NotEnoughSlotsError, match="at most 6"):
        slots.check(8, SlotCounts(total=6, max_total=6), barrier=False)


def test_a_cluster_that_scales_itself_says_so() -> None:
    tags = "spark.databricks.clusterUsageTags."
    conf = {
        "spark.master": "spark://10.0.0.1:7077",
        f"{tags}clusterScalingType": "autoscaling",
        f"{tags}clusterMinWorkers": "2",
        f"{tags}clusterMaxWorkers": "8",
    }
    assert "the cluster scales itself (2 to 8 nodes)" in slots.of_settings(conf.get).describe(4)
    assert "scales" not in slots.of_settings({**conf, f"{tags}clusterScalingType": "fixed_size"}.get).describe(4)


@pytest.mark.parametrize(
    ("master", "cpus_per_task", "expected"),
    [
        ("local", 1, 1),
        ("local[4]", 1, 4),
        ("local[4, 3]", 2, 2),
        ("local[*]", 1, None),
        ("local-cluster[2,3,1024]", 1, 6),
        ("local-cluster[2, 3, 1024]", 2, 2),
        ("spark://10.0.0.1:7077", 1, None),
        ("yarn", 1, None),
    ],
)
def test_the_name_of_a_local_master_gives_its_slots(master: str, cpus_per_task: int, expected: int | None) -> None:
    assert slots.of_master(master, cpus_per_task) == expected


def test_settings_alone_give_a_cluster_s_upper_bound() -> None:
    conf = {
        "spark.master": "k8s://host",
        "spark.executor.instances": "4",
        "spark.executor.cores": "8",
        "spark.task.cpus": "2",
        "spark.executor.resource.gpu.amount": "2",
        "spark.task.resource.gpu.amount": "1",
    }
    found = slots.of_settings(conf.get)
    assert (found.total, found.max_total, found.gpus_per_task) == (None, 8, 1.0)
    assert not found.dynamic_allocation


def test_what_is_there_counts_where_the_settings_ask_for_less() -> None:
    conf = {"spark.master": "yarn", "spark.executor.instances": "2", "spark.executor.cores": "4"}
    known = slots.of_settings(conf.get)
    assert (known.max_total, slots.with_total(known, 20, 3).max_total, slots.with_total(known, 4, 0).max_total) == (
        8,
        20,
        8,
    )
    slots.check(16, slots.with_total(known, 20, 3))
    # A standalone master starts as many executors as there is room for, whatever the number asked for.
    alone = slots.of_settings({**conf, "spark.master": "spark://10.0.0.1:7077"}.get)
    assert (alone.max_total, slots.with_total(alone, 20, 0).max_total) == (None, None)


def test_dynamic_allocation_counts_on_clusters_only() -> None:
    on = {"spark.dynamicAllocation.enabled": "true"}
    assert slots.of_settings({**on, "spark.master": "yarn"}.get).dynamic_allocation
    assert slots.of_settings({**on, "spark.master": "local-cluster[2,1,1024]"}.get).dynamic_allocation
    assert not slots.of_settings({**on, "spark.master": "local[*]"}.get).dynamic_allocation


def test_the_number_of_instances_is_not_a_limit_where_spark_adds_executors() -> None:
    conf = {
        "spark.master": "yarn",
        "spark.dynamicAllocation.enabled": "true",
        "spark.executor.instances": "2",  # Spark starts with them
        "spark.executor.cores": "4",
    }
    slots.check(64, slots.with_total(slots.of_settings(conf.get), 8, 0), barrier=False)
    capped = slots.of_settings({**conf, "spark.dynamicAllocation.maxExecutors": "10"}.get)
    assert capped.max_total == 40
    slots.check(40, capped, barrier=False)
    with pytest.raises(NotEnoughSlotsError, match=r"at most 40: .*spark\.dynamicAllocation\.maxExecutors"):
        slots.check(41, capped, barrier=False)
    off = {**conf, "spark.dynamicAllocation.enabled": "false", "spark.dynamicAllocation.maxExecutors": "10"}
    assert slots.of_settings(off.get).max_total == 8
    alone = {**conf, "spark.master": "spark://10.0.0.1:7077", "spark.dynamicAllocation.maxExecutors": "3"}
    assert slots.of_settings(alone.get).max_total == 12
