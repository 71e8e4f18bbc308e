from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import hvd_cluster.torch as hvd
from hvd_cluster.launch import local
from hvd_cluster.torch.elastic.snapshot import copied
from hvd_cluster.torch.elastic.state import StateHandler, get_handler_registry, set_handler_registry


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def trained(steps: int, lr: float = 0.1) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    step(model, optimizer, steps)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(5, 3)).sum().backward()
        optimizer.step()


def everything(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    moments = [v for entry in optimizer.state_dict()["state"].values() for v in entry.values()]
    return [*(p.clone() for p in model.state_dict().values()), *(m.clone() for m in moments)]


def equal(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.long
def test_a_model_and_its_optimizer_go_back_to_the_commit_and_train_on_as_if_nothing_was() -> None:
    model, optimizer = trained(2)
    state = hvd.elastic.TorchState(model, optimizer, epoch=1)
    step(model, optimizer)
    state.epoch = 2
    state.commit()
    committed = everything(model, optimizer)
    step(model, optimizer)
    after_one_more = everything(model, optimizer)
    step(model, optimizer, 3)
    for _ in range(2):  # restoring leaves what was saved alone
        state.restore()
        assert equal(everything(model, optimizer), committed)
        assert all(p.grad is None for p in model.parameters())
        assert state.epoch == 2
        step(model, optimizer)
        assert equal(everything(model, optimizer), after_one_more)


def test_a_restore_before_the_first_commit_goes_back_to_the_last_sync() -> None:
    model, optimizer = trained(1)
    state = hvd.elastic.TorchState(model, optimizer)
    step(model, optimizer)
    state.sync()
    synced = everything(model, optimizer)
    step(model, optimizer)
    state.restore()
    assert equal(everything(model, optimizer), synced)


def test_a_restore_keeps_the_dtypes_of_the_optimizer_s_state_and_its_groups() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    exact = torch.tensor([1.0009765625, 3.0])  # not a bfloat16
    optimizer.state[weight]["momentum_buffer"] = exact.clone()
    group = optimizer.param_groups[0]
    state = hvd.elastic.TorchState(None, optimizer)
    for _ in range(2):
        optimizer.state[weight]["momentum_buffer"].zero_()
        state.restore()
        assert optimizer.state[weight]["momentum_buffer"].dtype == torch.float32
        assert torch.equal(optimizer.state[weight]["momentum_buffer"], exact)
        assert optimizer.param_groups[0] is group


def test_an_object_that_is_assigned_is_taken_care_of_from_then_on() -> None:
    model, optimizer = trained(1)
    state = hvd.elastic.TorchState(model, optimizer, other=torch.nn.Linear(1, 1))
    new = torch.nn.Linear(1, 1)
    weight = new.weight.detach().clone()
    state.other = new
    with torch.no_grad():
        new.weight.add_(1.0)
    state.restore()
    assert torch.equal(new.weight, weight)
    assert state.other is new
    assert hvd.elastic.TorchState(epoch=0).model is None


def test_a_commit_reuses_the_memory_of_the_commit_before() -> None:
    first = copied({"a": torch.ones(3), "list": [torch.zeros(2), 1.5, "x"]})
    address = first["a"].data_ptr()
    second = copied({"a": torch.full((3,), 2.0), "list": [torch.ones(2), 2.5, "y"]}, first)
    assert second["a"].data_ptr() == address
    assert second["a"].tolist() == [2.0] * 3
    assert (second["list"][0].tolist(), second["list"][1:]) == ([1.0, 1.0], [2.5, "y"])
    third = copied({"a": torch.ones(4), "list": []}, second)
    assert (third["a"].tolist(), third["list"]) == ([1.0] * 4, [])


def test_a_restored_module_learns_which_version_its_state_has() -> None:
    class Observer(torch.nn.Module):
        """As quantization's: a state of version 1 had no ``eps``, so loading one sets it."""

        _version = 2

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("eps", torch.tensor([1.0]))

        def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *others: Any) -> None:
            if metadata.get("version") is None or metadata["version"] < 2:
                state_dict[prefix + "eps"] = torch.tensor([-1.0])
            super()._load_from_state_dict(state_dict, prefix, metadata, *others)

    model = torch.nn.Sequential(torch.nn.Linear(1, 1), Observer())
    state = hvd.elastic.TorchState(model)
    model[1].eps.fill_(3.0)
    state.commit()
    for _ in range(2):
        model[1].eps.fill_(5.0)
        state.restore()
        assert model[1].eps.tolist() == [3.0]


def test_dicts_of_every_kind_are_copied() -> None:
    counts: Any = defaultdict(int, seen=torch.ones(1))
    copy = copied(counts)
    assert copy["seen"] is not counts["seen"]
    assert (copy["seen"].tolist(), copy["unseen"]) == ([1.0], 0)
    assert "unseen" not in counts


def test_kinds_of_one_s_own_can_be_handled() -> None:
    class Counter:
        def __init__(self) -> None:
            self.value = 0

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state_dict: dict[str, int]) -> None:
            self.value = state_dict["value"]

    registry = list(get_handler_registry())
    handler = type("CounterHandler", (registry[0][1].__mro__[1],), {"sync": lambda self: self.save()})
    set_handler_registry([*registry, (Counter, handler)])
    try:
        state = hvd.elastic.TorchState(counter=Counter())
        state.counter.value = 5
        state.commit()
        state.counter.value = 6
        state.restore()
        assert state.counter.value == 5
    finally:
        set_handler_registry(registry)


def apart() -> dict[str, Any]:
    """Ranks that begin apart, with equal structure but on rank 0 only a used optimizer."""
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1 * (hvd.rank() + 1)))
    sampler = hvd.elastic.ElasticSampler(range(40), shuffle=False)
    if hvd.rank() == 0:
        sampler.record_batch(0, 4)
        with optimizer.skip_synchronize():
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            torch.optim.Adam.step(optimizer)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, step=hvd.rank())
    state.sync()
    found = {
        "weights": [p.detach().flatten().tolist() for p in model.parameters()],
        "lr": optimizer.param_groups[0]["lr"],
        "moments": [entry["exp_avg"].flatten().tolist() for entry in optimizer.state_dict()["state"].values()],
        "step": state.step,
        "samples": list(sampler),
    }
    state.commit()
    hvd.shutdown()
    return found


@pytest.mark.slow
def test_a_sync_makes_all_ranks_rank_0_and_deals_what_is_left() -> None:
    first, second = local.run(apart, num_proc=2, env={"OMP_NUM_THREADS": "1"})
    assert (first.pop("samples"), second.pop("samples")) == (list(range(8, 40, 2)), list(range(9, 40, 2)))
    assert first == second
    assert (first["lr"], first["step"]) == (0.1, 0)
    assert len(first["moments"]) == 2


class Counted(torch.nn.Linear):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.extra: dict[str, Any] = {"calls": 0}

    def get_extra_state(self) -> dict[str, Any]:
        return self.extra

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.extra = state


class Noisy(Counted):
    """Its extra state is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.zeros(1 + hvd.rank())


def with_extra_state() -> list[Any]:
    hvd.init()
    shared = Counted()
    model = torch.nn.Sequential(shared, torch.nn.Linear(1, 1), torch.nn.Sequential(Noisy(), shared))
    state = hvd.elastic.TorchState(model, head=Counted(), plain=torch.nn.Linear(1, 1), nets={"last": Counted()})
    if hvd.rank() == 0:  # the other rank is a new worker
        shared.extra["calls"] = 5
        model[2][0].extra.fill_(6.0)
        state.head.extra["calls"] = 7
        state.nets["last"].extra["calls"] = 8
    state.sync()

    def extras() -> list[Any]:
        return [shared.extra["calls"], model[2][0].extra.tolist(), state.head.extra, state.nets["last"].extra]

    found = copy.deepcopy(extras())
    shared.extra["calls"] = 9
    state.restore()
    assert extras() == found
    hvd.shutdown()
    return found


def test_a_new_worker_gets_the_extra_state_of_modules() -> None:
    results = local.run(with_extra_state, num_proc=2, env={"OMP_NUM_THREADS": "1"})
    assert results == [[5, [6.0], {"calls": 7}, {"calls": 8}]] * 2


def broken_off() -> tuple[list[float], int, list[float]]:
    """A sync that fails after it has overwritten the first of the state's objects."""
    hvd.init()

    class Last:
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state_dict: dict[str, int]) -> None:
            pass

    class LastHandler(StateHandler):
        def sync(self) -> None:
            raise hvd.HorovodInternalError("rank 0 has died")

    set_handler_registry([*get_handler_registry(), (Last, LastHandler)])
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, float(hvd.rank()))
    state = hvd.elastic.TorchState(first=model, last=Last(), step=hvd.rank())
    with pytest.raises(hvd.HorovodInternalError):
        state.sync()
    partly = model.weight.flatten().tolist()
    state.restore()
    found = partly, state.step, model.weight.flatten().tolist()
    hvd.shutdown()
    return found


@pytest.mark.slow
def test_a_sync_that_fails_halfway_can_be_undone() -> None:
    results = local.run(broken_off, num_proc=2, env={"OMP_NUM_THREADS": "1"})
    assert results == [([0.0], 0, [0.0]), ([0.0], 1, [1.0])]


def paced() -> list[Any]:
    hvd.init()
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0 * (hvd.rank() + 1))
    state = hvd.elastic.TorchState(None, optimizer, scheduler=scheduler, scaler=scaler)
    state.sync()
    found = []
    for _ in range(2):
        state.scaler.scale(weight.sum()).backward()
        state.scaler.step(optimizer)
        state.scaler.update()
        state.scheduler.step()
        found.append((optimizer.param_groups[0]["lr"], scaler.get_scale()))
        state.restore()
    return [*found, scheduler.last_epoch, state.scheduler is scheduler, state.scaler is scaler, weight.tolist()]


def test_a_scheduler_and_a_scaler_of_a_state_continue_acting_on_its_optimizer() -> None:
    assert (
        local.run(paced, num_proc=2, env={"OMP_NUM_THREADS": "1"})
        == [[(0.5, 4.0), (0.5, 4.0), 0, True, True, [-2.0, -2.0]]] * 2
    )


class Warmup:
    """A schedule that is not one of torch's, as those of timm."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.num_steps = 0

    def step(self) -> None:
        self.num_steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * self.num_steps

    def state_dict(self) -> dict[str, int]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.num_steps = state_dict["num_steps"]


def warmed_up() -> tuple[bool, int, float]:
    hvd.init()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    schedule = Warmup(optimizer)
    schedule.num_steps = 3 * hvd.rank()
    state = hvd.elastic.TorchState(optimizer=optimizer, schedule=schedule)
    state.sync()
    state.schedule.step()
    state.commit()
    state.schedule.step()
    state.restore()
    state.schedule.step()
    found = state.schedule is schedule, schedule.num_steps, optimizer.param_groups[0]["lr"]
    hvd.shutdown()
    return found


@pytest.mark.slow
def test_an_object_with_a_state_dict_continues_acting_on_the_optimizer() -> None:
    results = local.run(warmed_up, num_proc=2, env={"OMP_NUM_THREADS": "1"})
    assert results == [(True, 2, pytest.approx(0.2))] * 2


@pytest.mark.parametrize("kind", [list, tuple, lambda found: {"deep": {str(i): one for i, one in enumerate(found)}}])
def test_a_container_of_modules_and_optimizers_is_restored_in_place(kind: Any) -> None:
    nets = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.5) for net in nets]
    saved = [net.weight.item() for net in nets]
    state = hvd.elastic.TorchState(nets=kind(nets), optimizers=kind(optimizers), empty=[], losses=[1.0, 2.0])
    state.save()
    for net, optimizer in zip(nets, optimizers, strict=True):
        net(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1
    state.losses.append(3.0)
    state.restore()
    assert [net.weight.item() for net in nets] == saved
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.5, 0.5]
    assert (state.losses, state.empty) == ([1.0, 2.0], [])


def test_a_container_is_replaced_and_synchronized() -> None:
    def nets() -> list[float]:
        hvd.init()
        state = hvd.elastic.TorchState(nets=[torch.nn.Linear(1, 1)])
        state.nets = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
        for index, net in enumerate(state.nets):
            torch.nn.init.constant_(net.weight, 10 * hvd.rank() + index)
        state.sync()
        state.restore()
        found = [net.weight.item() for net in state.nets]
        hvd.shutdown()
        return found

    assert local.run(nets, num_proc=2, env={"OMP_NUM_THREADS": "1"}) == [[0.0, 1.0]] * 2


def test_the_plain_values_of_a_container_are_saved_and_synchronized_too() -> None:
    def run() -> tuple[list[Any], list[Any], bool]:
        hvd.init()
        net = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(net.weight, float(hvd.rank()))
        options: dict[str, Any] = {"net": net, "epoch": hvd.rank(), "losses": []}
        if hvd.rank() == 0:
            options["best"] = 0.5
        state = hvd.elastic.TorchState(run=options)
        state.sync()
        synchronized = [net.weight.item(), options["epoch"], options["best"]]
        options["epoch"] = 7
        options["losses"].append(1.0)
        torch.nn.init.constant_(net.weight, 9.0)
        state.restore()
        restored = [net.weight.item(), options["epoch"], options["losses"]]
        hvd.shutdown()
        return synchronized, restored, state.run is options

    expected = [0.0, 0, 0.5], [0.0, 0, []], True
    assert local.run(run, num_proc=2, env={"OMP_NUM_THREADS": "1"}) == [expected] * 2


def test_objects_that_are_added_to_a_container_later_are_not_copied() -> None:
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    state = hvd.elastic.TorchState(parts=[net, 3], empty=[], deep={"lists": [[1]]}, scheduler=None, epoch=0)
    added = [torch.optim.lr_scheduler.StepLR(optimizer, step) for step in range(1, 5)]
    state.parts.insert(1, added[0])
    state.empty.append(added[1])
    state.deep["lists"][0].append(added[2])
    state.scheduler = added[3]
    containers = [state.parts, state.empty, state.deep]
    for commit in (state.commit, state.save, state.sync):
        commit()
        epochs = [scheduler.last_epoch for scheduler in added]
        optimizer.step()
        for scheduler in added:
            scheduler.step()
        state.restore()
        assert [scheduler.last_epoch for scheduler in added] == epochs
        found = [state.parts[1], state.empty[0], state.deep["lists"][0][1], state.scheduler]
        assert all(one is other for one, other in zip(found, added, strict=True))
        assert all(one is other for one, other in zip([state.parts, state.empty, state.deep], containers, strict=True))
        assert (state.parts[0], state.parts[2], state.deep["lists"][0][0]) == (net, 3, 1)
        optimizer.step()
        added[0].step()  # not back to where the loop began


def test_a_restore_removes_what_a_container_got_after_the_save_and_returns_what_it_lost() -> None:
    nets = [torch.nn.Linear(1, 1) for _ in range(4)]
    state = hvd.elastic.TorchState(nets=[nets[0], 1, nets[1]], named={"net": nets[2], "epoch": 1}, plain={"a": 1})
    weight = nets[1].weight.item()
    state.save()
    torch.nn.init.constant_(nets[1].weight, 9.0)
    state.nets[:] = [nets[3], nets[0], 5, 6, 7]
    state.named |= {"new": 5, "late": nets[3]}
    del state.named["net"]
    state.plain["b"] = nets[3]
    state.restore()
    assert state.nets == [nets[0], 1, nets[1]]
    assert list(state.named.items()) == [("net", nets[2]), ("epoch", 1)]
    assert state.plain == {"a": 1}
    assert nets[1].weight.item() == weight


def test_containers_that_contain_each_other_are_saved() -> None:
    one: list[Any] = [torch.nn.Linear(1, 1)]
    other: list[Any] = [torch.nn.Linear(1, 1), one]
    one.append(other)
    state = hvd.elastic.TorchState(one=one, other=other)
    weights = [one[0].weight.item(), other[0].weight.item()]
    state.save()
    for net in (one[0], other[0]):
        torch.nn.init.constant_(net.weight, 9.0)
    state.restore()
    assert [state.one[0].weight.item(), state.other[0].weight.item()] == weights


def grown() -> list[Any]:
    """Rank 0 has added entries to its containers; the other rank is a new worker."""
    hvd.init()
    net = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(net.weight, float(hvd.rank()))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0 + hvd.rank())
    state = hvd.elastic.TorchState(
        parts=[net, 1], best={}, late=[], by_net={net: optimizer}, losses=[], spare=[7] * hvd.rank()
    )
    state.late.append(torch.optim.lr_scheduler.StepLR(optimizer, 10))  # on both ranks
    if hvd.rank() == 0:
        optimizer.step()
        state.late[0].step()
        state.parts += [2, 3]
        state.best["net"] = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(state.best["net"].weight, 5.0)
        state.losses.append(0.5)
    else:
        state.best["other"] = torch.nn.Linear(1, 1)
    state.sync()
    state.restore()
    found = [
        net.weight.item(),
        state.parts[0] is net,
        state.parts[1:],
        {name: best.weight.item() for name, best in state.best.items()},
        (state.late[0].last_epoch, state.late[0].optimizer is optimizer),
        (state.by_net[net] is optimizer, optimizer.param_groups[0]["lr"]),
        (state.losses, state.spare),
    ]
    hvd.shutdown()
    return found


@pytest.mark.slow
def test_a_new_worker_gets_the_containers_as_they_have_become() -> None:
    expected = [0.0, True, [1, 2, 3], {"net": 5.0}, (1, True), (True, 1.0), ([0.5], [])]
    assert local.run(grown, num_proc=2, env={"OMP_NUM_THREADS": "1"}) == [expected] * 2


@pytest.mark.slow
def test_an_optimizer_that_a_new_worker_lacks_is_an_error_on_all_ranks() -> None:
    def run() -> str:
        hvd.init()
        net = torch.nn.Linear(1, 1)
        state = hvd.elastic.TorchState(net, deep=[[]])
        if hvd.rank() == 0:
            state.deep[0].append(torch.optim.SGD(net.parameters(), lr=1.0))
        with pytest.raises(ValueError, match="rank 0 has a SGD at 'deep', and rank 1 does not") as caught:
            state.sync()
        hvd.shutdown()
        return str(caught.value)

    first, second = local.run(run, num_proc=2, env={"OMP_NUM_THREADS": "1"})
    assert first == second


def test_a_dict_of_tensors_and_a_list_that_contains_itself_are_plain_values() -> None:
    best = torch.nn.Linear(1, 1).state_dict()
    loop: list[Any] = [1]
    loop.append(loop)
    state = hvd.elastic.TorchState(best=best, loop=loop)
    state.save()
    state.restore()
    assert list(state.best) == ["weight", "bias"]
    assert state.loop[1] is state.loop


def test_a_loss_that_still_has_its_graph_is_saved_and_restored() -> None:
    model, optimizer = trained(1)
    state = hvd.elastic.TorchState(model, optimizer, loss=torch.tensor(0.0), nets=[model, None], nested={"loss": 0.0})
    loss = model(torch.ones(5, 3)).mean()
    state.loss, state.nets[1], state.nested = loss, loss, {"loss": loss}
    state.commit()
    state.loss, state.nets[1], state.nested = None, None, None
    for _ in range(2):  # restoring leaves what was saved alone
        state.restore()
        assert state.loss.item() == state.nets[1].item() == state.nested["loss"].item() == loss.item()
        with torch.no_grad():
            state.loss += 1


def test_a_class_and_a_missing_entry_are_plain_values() -> None:
    net = torch.nn.Linear(1, 1)
    state = hvd.elastic.TorchState(kind=torch.nn.Linear, kinds=[torch.nn.Linear, Warmup], nets=[net, None])
    saved = net.weight.item()
    state.save()
    torch.nn.init.constant_(net.weight, 9.0)
    state.restore()
    assert (state.kind, state.kinds) == (torch.nn.Linear, [torch.nn.Linear, Warmup])
    assert state.nets == [net, None]
    assert net.weight.item() == saved
