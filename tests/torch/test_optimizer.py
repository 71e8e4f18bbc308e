"""DistributedOptimizer on real ranks: the weights it gives are those of one process on all the data."""

from __future__ import annotations

import copy
import threading
import time
import warnings
from typing import Any

import pytest
import torch

from hvd_cluster.errors import HorovodInternalError, WorkerFailedError
from hvd_cluster.launch import local

OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.01},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.05},
    "RMSprop": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "Rprop": {"lr": 0.01},
}


def make_net(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def weights(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def data(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(num_rows, 6, generator=generator), torch.randn(num_rows, 3, generator=generator)


def trained_alone(kind: str, options: dict[str, Any], num_steps: int = 5, batch: int = 12) -> torch.Tensor:
    net = make_net()
    optimizer = getattr(torch.optim, kind)(net.parameters(), **options)
    x, y = data(num_steps * batch)
    for step in range(num_steps):
        rows = slice(step * batch, (step + 1) * batch)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x[rows]), y[rows]).backward()
        optimizer.step()
    return weights(net)


def trained_together(hvd: Any, kind: str, options: dict[str, Any], arguments: dict[str, Any]) -> torch.Tensor:
    net = make_net(seed=hvd.rank())
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    optimizer = getattr(torch.optim, kind)(net.parameters(), **options)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters(), **arguments)
    assert type(optimizer).__name__ == kind
    assert isinstance(optimizer, getattr(torch.optim, kind))
    x, y = data(5 * 12)
    share = 12 // hvd.size()
    for step in range(5):
        start = step * 12 + hvd.rank() * share
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x[start : start + share]), y[start : start + share]).backward()
        optimizer.step()
    return weights(net)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_several_ranks_give_the_weights_of_one_process(three: Any, kind: str) -> None:
    expected = trained_alone(kind, OPTIMIZERS[kind])
    for result in three(trained_together, kind, OPTIMIZERS[kind], {}):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "arguments",
    [{"groups": 2}, {"gradient_predivide_factor": 2.0}, {"groups": 1, "gradient_predivide_factor": 4.0}],
    ids=str,
)
def test_ways_of_sending_do_not_change_the_result(two: Any, arguments: dict[str, Any]) -> None:
    expected = trained_alone("SGD", OPTIMIZERS["SGD"])
    first, second = two(trained_together, "SGD", OPTIMIZERS["SGD"], arguments)
    torch.testing.assert_close(first, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("op", "expected"), [("Sum", [9.0, -3.0]), ("Min", [2.0, -2.0]), ("Max", [4.0, 0.0]), ("Product", [24.0, 0.0])]
)
def test_gradients_are_reduced_with_every_op(three: Any, op: str, expected: list[float]) -> None:
    def fn(hvd: Any) -> list[list[float]]:
        dense, sparse = torch.nn.Parameter(torch.zeros(2)), torch.nn.Embedding(2, 1, sparse=True)
        torch.nn.init.zeros_(sparse.weight)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([dense, sparse.weight], lr=1.0), op=getattr(hvd, op))
        for _ in range(2):  # the second step sends buckets while backward runs
            optimizer.zero_grad()
            mine = torch.tensor([2.0 + hvd.rank(), -float(hvd.rank())])
            ((dense * mine).sum() + (sparse(torch.arange(2)).flatten() * mine).sum()).backward()
            optimizer.step()
        assert sparse.weight.grad.is_sparse == (op == "Sum")
        return [dense.tolist(), sparse.weight.flatten().tolist()]

    assert three(fn) == [[[-2 * value for value in expected]] * 2] * 3


def test_groups_may_be_generators_and_have_parameters_that_the_optimizer_does_not_have(two: Any) -> None:
    def fn(hvd: Any) -> list[list[int]]:
        net = make_net()
        net[0].requires_grad_(False)
        found = []
        for groups in ([list(layer.parameters()) for layer in net], [layer.parameters() for layer in net]):
            optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
            optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters(), groups=groups)
            net(torch.ones(1, 6)).sum().backward()
            optimizer.step()
            found.append([len(group) for group in optimizer._reducer.index.groups])
        return found

    assert two(fn) == [[[2], [2]]] * 2


def test_num_groups_is_the_old_name_of_groups(two: Any) -> None:
    def fn(hvd: Any) -> torch.Tensor:
        with pytest.warns(DeprecationWarning, match="num_groups is deprecated: use groups"):
            result = trained_together(hvd, "SGD", OPTIMIZERS["SGD"], {"num_groups": 3})
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with pytest.warns(DeprecationWarning, match="num_groups"), pytest.raises(ValueError, match="must be >= 0"):
            hvd.DistributedOptimizer(optimizer, net.named_parameters(), num_groups=-1)
        return result

    expected = trained_alone("SGD", OPTIMIZERS["SGD"])
    for result in two(fn):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_compressed_gradients_are_close_and_equal_on_all_ranks(two: Any) -> None:
    def fn(hvd: Any) -> torch.Tensor:
        return trained_together(hvd, "SGD", {"lr": 0.1}, {"compression": hvd.Compression.fp16})

    first, second = two(fn)
    torch.testing.assert_close(first, trained_alone("SGD", {"lr": 0.1}), rtol=1e-2, atol=1e-2)
    assert torch.equal(first, second)


def test_gradients_of_several_passes_are_summed_before_they_are_reduced(two: Any) -> None:
    def fn(hvd: Any) -> torch.Tensor:
        net = make_net()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), backward_passes_per_step=2
        )
        x, y = data(24)
        for part in range(2):
            start = hvd.rank() * 12 + part * 6
            rows = slice(start, start + 6)
            torch.nn.functional.mse_loss(net(x[rows]), y[rows]).backward()
        optimizer.step()
        return weights(net)

    # The sum over two passes of the average over two ranks is twice the mean over all rows.
    net = make_net()
    x, y = data(24)
    (2 * torch.nn.functional.mse_loss(net(x), y)).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    for result in two(fn):
        torch.testing.assert_close(result, weights(net), rtol=1e-4, atol=1e-5)


def test_a_copy_keeps_the_number_of_passes_that_was_set_later(two: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        optimizer.set_backward_passes_per_step(2)
        optimizer, weight = copy.deepcopy((optimizer, weight))
        for _ in range(2):
            (weight * (hvd.rank() + 1)).sum().backward()
        optimizer.step()
        return weight.tolist()

    assert two(fn) == [[-3.0, -3.0]] * 2


def test_one_backward_pass_too_many_is_an_error(two: Any) -> None:
    def fn(hvd: Any) -> None:
        net = make_net()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        net(torch.ones(1, 6)).sum().backward()
        with pytest.raises(AssertionError, match="more than backward_passes_per_step times"):
            net(torch.ones(1, 6)).sum().backward()
        with pytest.raises(AssertionError, match=r"optimizer\.zero_grad\(\) was called after loss\.backward\(\)"):
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()

    two(fn)


def test_gradients_are_clipped_between_synchronize_and_step(two: Any) -> None:
    def fn(hvd: Any) -> float:
        net = make_net()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())
        before = weights(net)
        (net(torch.full((1, 6), 10.0 * (hvd.rank() + 1))).sum() * 100).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        return (weights(net) - before).norm().item()

    first, second = two(fn)
    assert first == second == pytest.approx(1.0, abs=1e-3)


def test_step_after_synchronize_without_the_context_warns(two: Any) -> None:
    def fn(hvd: Any) -> None:
        net = make_net()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())
        net(torch.ones(1, 6)).sum().backward()
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="called without optimizer.skip_synchronize"):
            optimizer.step()

    two(fn)


@pytest.mark.parametrize("way", ["zero_grad", "zero_grad of the model", "load_state_dict", "no pass on one rank"])
def test_a_step_after_one_that_was_skipped_reduces_its_own_gradients(two: Any, way: str) -> None:
    def fn(hvd: Any) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        optimizer = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=2)
        for _ in range(2):
            (weight.sum() * float("inf")).backward()
        optimizer.synchronize()  # the norm is not finite: the program skips the step
        if way == "load_state_dict":
            optimizer.load_state_dict(optimizer.state_dict())
            weight.grad = None
        elif way == "zero_grad of the model":
            weight.grad = None
        else:
            optimizer.zero_grad()
        if way != "no pass on one rank" or hvd.rank() == 1:
            (weight.sum() * 2 * hvd.rank()).backward()  # the rest of the data: fewer passes than a step takes
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
        return weight.tolist()

    assert two(fn) == [[-1.0, -1.0]] * 2


def test_a_layer_that_only_one_rank_used_gets_the_average_with_zeros(two: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        used, sometimes = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
        named = [("used", used.weight), ("sometimes", sometimes.weight)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([used.weight, sometimes.weight], lr=1.0), named)
        x = torch.ones(1, 1)
        (used(x) + (sometimes(x) if hvd.rank() == 0 else 0)).sum().backward()
        optimizer.synchronize()
        return [used.weight.grad.item(), sometimes.weight.grad.item()]

    assert two(fn) == [[1.0, 0.5]] * 2


def test_frozen_parameters_can_be_unfrozen_later(two: Any) -> None:
    def fn(hvd: Any) -> tuple[bool, torch.Tensor]:
        net = make_net()
        net[0].requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        net(torch.ones(1, 6)).sum().backward()
        optimizer.step()
        stayed_frozen = net[0].weight.grad is None
        net[0].requires_grad_(True)
        optimizer.zero_grad()
        (net(torch.ones(1, 6)).sum() * (hvd.rank() + 1)).backward()
        optimizer.step()
        return stayed_frozen, weights(net)

    (first_frozen, first), (second_frozen, second) = two(fn)
    assert first_frozen
    assert second_frozen
    assert torch.equal(first, second)


@pytest.mark.parametrize("options", [{"sparse_as_dense": True}, {"op": "Sum", "sparse_as_dense": True}, {"op": "Max"}])
def test_an_optimizer_for_sparse_gradients_gets_them_where_they_travel_as_dense(
    two: Any, options: dict[str, Any]
) -> None:
    def fn(hvd: Any) -> torch.Tensor:
        embedding = torch.nn.Embedding(5, 2, sparse=True, _weight=torch.zeros(5, 2))
        arguments = options | ({"op": getattr(hvd, options["op"])} if "op" in options else {})
        optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, embedding.named_parameters(), **arguments)
        for _ in range(3):
            optimizer.zero_grad()
            embedding(torch.tensor([hvd.rank(), 3])).sum().backward()
            assert embedding.weight.grad.is_sparse
            optimizer.step()
        return embedding.weight.detach()

    first, second = two(fn)
    assert torch.equal(first, second)
    assert (first != 0).any(dim=1).tolist() == [True, True, False, True, False]


@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_the_names_of_parameters_can_be_read(two: Any, op: str) -> None:
    def fn(hvd: Any) -> list[str]:
        first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
        optimizer.add_param_group({"params": list(second.parameters())})
        optimizer = hvd.DistributedOptimizer(optimizer, op=getattr(hvd, op))
        names = optimizer._parameter_names
        assert set(names) == {*first.parameters(), *second.parameters()}
        return [names[p] for p in [*first.parameters(), *second.parameters()]]

    mine, theirs = two(fn)
    assert mine == theirs
    assert len(set(mine)) == 4


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients_of_embeddings_are_averaged(two: Any, as_dense: bool) -> None:
    def fn(hvd: Any) -> torch.Tensor:
        embedding = torch.nn.Embedding(5, 2, sparse=True)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(embedding.parameters(), lr=1.0), embedding.named_parameters(), sparse_as_dense=as_dense
        )
        embedding(torch.tensor([hvd.rank(), 3])).sum().backward()
        optimizer.synchronize()
        assert embedding.weight.grad.is_sparse != as_dense
        return embedding.weight.grad.to_dense()

    expected = torch.tensor([0.5, 0.5, 0.0, 1.0, 0.0]).unsqueeze(1).expand(5, 2)
    for result in two(fn):
        torch.testing.assert_close(result, expected)


def test_ranks_whose_optimizers_reduce_sparse_gradients_differently_are_an_error(two: Any) -> None:
    def fn(hvd: Any) -> str:
        embedding = torch.nn.Embedding(5, 2, sparse=True)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(embedding.parameters(), lr=1.0),
            embedding.named_parameters(),
            op=[hvd.Sum, hvd.Average][hvd.rank()],
        )

        def step() -> None:
            embedding(torch.tensor([3])).sum().backward()
            optimizer.step()

        with pytest.raises(hvd.HorovodInternalError, match=r"Mismatched reduction operation.* for AVERAGE") as caught:
            step()
        return str(caught.value)

    mine, theirs = two(fn)
    assert mine == theirs
    assert "weight" in mine


def test_state_dicts_go_back_and_forth_with_the_unwrapped_optimizer(two: Any) -> None:
    def fn(hvd: Any) -> None:
        net = make_net()
        plain = torch.optim.Adam(net.parameters(), lr=0.01)
        wrapped = hvd.DistributedOptimizer(plain, net.named_parameters())
        net(torch.ones(1, 6)).sum().backward()
        wrapped.step()
        fresh = torch.optim.Adam(make_net().parameters(), lr=0.5)
        fresh.load_state_dict(wrapped.state_dict())
        assert fresh.param_groups[0]["lr"] == 0.01
        wrapped.load_state_dict(fresh.state_dict())
        wrapped.zero_grad()
        net(torch.ones(1, 6)).sum().backward()
        wrapped.step()
        assert int(wrapped.state_dict()["state"][0]["step"]) == 2

    two(fn)


def test_a_scheduler_drives_the_wrapped_optimizer(two: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        net = make_net()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        rates = []
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(1, 6)).sum().backward()
            optimizer.step()
            rates.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
        return rates

    assert two(fn) == [[1.0, 0.5, 0.25]] * 2


def test_a_closure_is_synchronized_at_each_evaluation(two: Any) -> None:
    def fn(hvd: Any) -> torch.Tensor:
        net = make_net()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3), net.named_parameters()
        )
        x, y = data(12)
        rows = slice(hvd.rank() * 6, hvd.rank() * 6 + 6)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(net(x[rows]), y[rows])
            loss.backward()
            return loss

        optimizer.step(closure)
        return weights(net)

    first, second = two(fn)
    assert torch.equal(first, second)


def test_a_closure_that_computes_nothing_does_not_sum_again(two: Any) -> None:
    def fn(hvd: Any) -> float:
        (weight,) = parameters = [torch.nn.Parameter(torch.zeros(1))]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), op=hvd.Sum)
        if hvd.rank() == 1:
            weight.sum().backward()
        optimizer.step(lambda: None)
        return weight.item()

    assert two(fn) == [-1.0] * 2


@pytest.mark.parametrize(
    ("options", "scale"), [({"op": "Sum"}, 2.0), ({}, 1.0), ({"gradient_predivide_factor": 2.0}, 1.0)], ids=str
)
def test_a_line_search_sees_loss_and_gradient_of_one_function(two: Any, options: dict[str, Any], scale: float) -> None:
    def stepped(net: torch.nn.Module, optimizer: Any, rows: slice, factor: float) -> tuple[torch.Tensor, list[float]]:
        x, y = data(12)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(net(x[rows]), y[rows]) * factor
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        return weights(net), losses

    def lbfgs(net: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(net.parameters(), lr=1.0, max_iter=4, line_search_fn="strong_wolfe")

    def fn(hvd: Any) -> tuple[torch.Tensor, list[float]]:
        net = make_net()
        arguments = {**options, "op": getattr(hvd, options.get("op", "Average"))}
        optimizer = hvd.DistributedOptimizer(lbfgs(net), net.named_parameters(), **arguments)
        return stepped(net, optimizer, slice(hvd.rank() * 6, hvd.rank() * 6 + 6), 1.0)

    net = make_net()
    expected, losses = stepped(net, lbfgs(net), slice(0, 12), scale)  # the sum of two means is twice the mean of all
    for found, of_rank in two(fn):
        assert of_rank == pytest.approx(losses, rel=1e-3)
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)


def test_optimizers_are_trained_in_several_threads(two: Any) -> None:
    def fn(hvd: Any) -> Any:
        results: dict[int, Any] = {}

        def train(number: int) -> None:
            try:
                weight = torch.nn.Parameter(torch.zeros(3))
                optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [(f"{number}.weight", weight)])
                for _ in range(10):
                    optimizer.zero_grad()
                    time.sleep(0.002 * ((number + hvd.rank()) % 2))  # in another order on each rank
                    (weight.sum() * (hvd.rank() + 1) * (number + 1)).backward()
                    optimizer.step()
                results[number] = weight.tolist()
            except Exception as error:  # noqa: BLE001 - whatever it is, the test shows it
                results[number] = repr(error)

        threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    assert two(fn) == [{0: [-15.0] * 3, 1: [-30.0] * 3}] * 2


def test_the_thread_that_trains_need_not_be_the_one_that_has_begun() -> None:
    def fn() -> list[float]:
        import hvd_cluster.torch as hvd

        weight = torch.nn.Parameter(torch.zeros(3))

        def train() -> None:
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
            (weight.sum() * (hvd.rank() + 1)).backward()
            optimizer.step()

        def run(work: Any) -> None:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()

        run(hvd.init)
        # The next thread may get the number of the one that has ended: here on rank 0, where no thread is between them.
        taken = threading.Event()
        between = threading.Thread(target=taken.wait)
        if hvd.rank() == 1:
            between.start()
        run(train)
        taken.set()
        return weight.tolist()

    assert local.run(fn, num_proc=2, env={"OMP_NUM_THREADS": "1"}) == [[-1.5] * 3] * 2


@pytest.mark.slow
def test_optimizers_of_two_threads_with_equal_names_are_an_error_on_all_ranks() -> None:
    def fn() -> list[str]:
        import hvd_cluster.torch as hvd

        hvd.init()
        errors = []

        def train() -> None:
            weight = torch.nn.Parameter(torch.zeros(3))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
            ready.wait()
            try:
                weight.sum().backward()
                optimizer.step()
            except (ValueError, HorovodInternalError) as error:
                errors.append(str(error))

        threads = [threading.Thread(target=train) for _ in range(2)]
        ready = threading.Barrier(2)
        if hvd.rank() == 1:
            time.sleep(1.0)  # so that both requests of rank 0 meet
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors

    for errors in local.run(fn, num_proc=2, env={"OMP_NUM_THREADS": "1"}):
        assert len(errors) == 2
        assert any("Make each in the thread that trains it" in error for error in errors)


def test_two_optimizers_in_one_program_do_not_meet(two: Any) -> None:
    def fn(hvd: Any) -> torch.Tensor:
        generator, critic = make_net(1), make_net(2)
        optimizers = [
            hvd.DistributedOptimizer(
                torch.optim.SGD(net.parameters(), lr=0.1), [(f"{label}.{n}", p) for n, p in net.named_parameters()]
            )
            for label, net in (("g", generator), ("c", critic))
        ]
        for net in (generator, critic):
            net(torch.full((1, 6), 1.0 + hvd.rank())).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        return torch.cat([weights(generator), weights(critic)])

    first, second = two(fn)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"backward_passes_per_step": 0}, ValueError, "backward_passes_per_step=0 must be > 0"),
        ({"gradient_predivide_factor": 2.0, "op": 1}, ValueError, "gradient_predivide_factor not supported"),
        ({"gradient_predivide_factor": 0}, ValueError, "must be another number"),
        ({"compression": "fp16"}, ValueError, "use hvd.Compression.fp16"),
        ({"op": "average"}, ValueError, "is none of hvd.Average"),
        ({"groups": -1}, ValueError, "must be >= 0"),
        ({"groups": "2"}, ValueError, "non-negative integer or a list of lists"),
        ({"groups": [["x"]]}, ValueError, "lists of tensors"),
        ({"named_parameters": [1, 2]}, ValueError, "sequence of tuples"),
    ],
)
def test_wrong_arguments_are_refused(two: Any, arguments: dict[str, Any], error: type, text: str) -> None:
    def fn(hvd: Any) -> None:
        net = make_net()
        with pytest.raises(error, match=text):
            hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), **arguments)

    two(fn)


def test_what_is_not_an_optimizer_is_refused_and_so_are_zero_passes(two: Any) -> None:
    def fn(hvd: Any) -> None:
        net = make_net()
        with pytest.raises(ValueError, match="expects a torch optimizer, got Sequential"):
            hvd.DistributedOptimizer(net)
        with pytest.raises(ValueError, match="must be > 0"):
            hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1)).set_backward_passes_per_step(0)

    two(fn)


def test_names_must_be_unique_and_complete(two: Any) -> None:
    def fn(hvd: Any) -> None:
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        named = list(net.named_parameters())
        with pytest.raises(ValueError, match=r"must be unique\. Found duplicates: 0\.weight"):
            hvd.DistributedOptimizer(optimizer, [*named, named[0]])
        with pytest.raises(ValueError, match="1 of the optimizer's 4 parameters were not"):
            hvd.DistributedOptimizer(optimizer, named[1:])
        weight = named[0][1]
        with pytest.raises(ValueError, match="can only appear once"):
            hvd.DistributedOptimizer(optimizer, named, groups=[[weight], [weight]])

    two(fn)


def test_other_names_on_one_rank_are_an_error_on_all(two: Any) -> None:
    def fn(hvd: Any) -> str:
        parameters = dict(make_net().named_parameters())
        if hvd.rank() == 1:
            parameters["mine"] = parameters.pop("2.weight")
        optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, parameters.items(), groups=2)
        with pytest.raises(ValueError, match="have different names on different ranks") as caught:
            sum(parameter.sum() for parameter in parameters.values()).backward()
        del optimizer
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0  # the engine goes on
        return str(caught.value)

    first, second = two(fn)
    assert first == second


def test_an_optimizer_is_made_without_the_other_ranks(two: Any) -> None:
    def fn(hvd: Any) -> float:
        if hvd.rank() == 0:  # as the newcomer of an elastic job does, while the others wait for it in sync()
            net = make_net()
            hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), groups=2)
        return hvd.allreduce(torch.ones(1), name="state", op=hvd.Sum).item()

    assert two(fn) == [2.0, 2.0]


def test_a_world_of_one_is_an_ordinary_optimizer() -> None:
    import hvd_cluster.torch as hvd

    hvd.init()
    try:
        result = trained_together(hvd, "Adam", {"lr": 0.01}, {})
    finally:
        hvd.shutdown()
    torch.testing.assert_close(result, trained_alone("Adam", {"lr": 0.01}))


def test_an_exception_between_two_steps_fails_the_job_with_the_users_text(two: Any) -> None:
    def fn(hvd: Any) -> None:
        net = make_net()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        net(torch.ones(1, 6)).sum().backward()
        optimizer.step()
        raise KeyError("my own mistake")

    with pytest.raises(WorkerFailedError, match="my own mistake"):
        two(fn)


def test_integer_parameters_are_left_alone(two: Any) -> None:
    def fn(hvd: Any) -> None:
        net = make_net()
        net.register_parameter("table", torch.nn.Parameter(torch.arange(3), requires_grad=False))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        net(torch.ones(1, 6)).sum().backward()
        optimizer.step()
        assert net.table.tolist() == [0, 1, 2]

    two(fn)
