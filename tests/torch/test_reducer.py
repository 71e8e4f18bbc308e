"""Gradients in buckets: ranks that have different gradients, at different times, still make the same requests."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hvd_cluster.launch import local


def scalars(count: int, value: float = 1.0) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.full((2,), value)) for _ in range(count)]


def named(parameters: list[torch.nn.Parameter]) -> list[tuple[str, torch.nn.Parameter]]:
    return [(f"p{i}", parameter) for i, parameter in enumerate(parameters)]


def test_after_the_first_step_a_bucket_is_one_request_and_the_timeline_names_its_tensors(tmp_path: Path) -> None:
    def fn() -> list[int]:
        import hvd_cluster.torch as hvd
        from hvd_cluster.torch import transfers

        hvd.init()
        requests: list[int] = []
        original = transfers.submit
        net = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(10)])
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        transfers.submit = lambda kind, tensors, **options: (
            requests.append(len(tensors)) or original(kind, tensors, **options)
        )
        try:
            for _ in range(3):
                optimizer.zero_grad()
                net(torch.ones(1, 4)).sum().backward()
                optimizer.step()
        finally:
            transfers.submit = original
        hvd.shutdown()
        return requests

    path = tmp_path / "timeline.json"
    env = {"OMP_NUM_THREADS": "1", "HOROVOD_TIMELINE": str(path)}
    assert local.run(fn, num_proc=2, env=env) == [[20, 20, 20]] * 2
    rows = {event["args"]["name"] for event in json.loads(path.read_text()) if event.get("name") == "thread_name"}
    assert {f"allreduce.{i}.{kind}" for i in range(10) for kind in ("weight", "bias")} <= rows


def test_gradients_that_other_ranks_do_not_have_take_part_as_zeros(three: Any) -> None:
    def fn(hvd: Any) -> list[list[float | None]]:
        parameters = scalars(5)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0), named(parameters))
        uses = [  # by step, then by rank: which parameters have a gradient
            ["012", "012", "012"],
            ["0", "1", "2"],
            ["", "01", ""],
            ["3", "", "12"],  # 3 has never been used before
            ["0123", "0123", "0123"],
            ["", "", "3"],
        ]
        found: list[list[float | None]] = []
        for step in uses:
            optimizer.zero_grad()
            loss = sum((parameters[int(i)].sum() * (hvd.rank() + 1) for i in step[hvd.rank()]), torch.zeros(()))
            if loss.requires_grad:
                loss.backward()
            optimizer.step()
            found.append([p.grad[0].item() for p in parameters])
        return found

    third = 1 / 3
    expected = [
        [2.0, 2.0, 2.0, 0.0, 0.0],
        [third, 2 * third, 1.0, 0.0, 0.0],
        [2 * third, 2 * third, 0.0, 0.0, 0.0],
        [0.0, 1.0, 1.0, third, 0.0],
        [2.0, 2.0, 2.0, 2.0, 0.0],
        [0.0, 0.0, 0.0, 1.0, 0.0],
    ]
    for result in three(fn):
        torch.testing.assert_close(torch.tensor(result), torch.tensor(expected))


@pytest.mark.parametrize("kind", ["SGD", "SparseAdam"])
def test_a_sparse_gradient_on_some_ranks_and_none_on_others(two: Any, kind: str) -> None:
    def fn(hvd: Any) -> Any:
        torch.manual_seed(0)
        first, second = torch.nn.Embedding(4, 2, sparse=True), torch.nn.Embedding(4, 2, sparse=True)
        parameters = [first.weight, second.weight]
        optimizer = getattr(torch.optim, kind)(parameters, lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, named(parameters))
        kinds = []
        # By step, then by rank: the embeddings that are used. The second one is first used in the third step.
        for used in [["0", "0"], ["0", ""], ["", "1"], ["1", "0"], ["", ""]]:
            optimizer.zero_grad()
            for index in used[hvd.rank()]:
                (first, second)[int(index)](torch.tensor([hvd.rank(), 3])).sum().backward()
            optimizer.step()
            kinds.append([p.grad.is_sparse for p in parameters])
        return kinds, first.weight.detach(), second.weight.detach()

    (kinds, *first), (_, *second) = two(fn)
    assert [row[0] for row in kinds] == [True] * 5
    assert [row[1] for row in kinds[2:]] == [True] * 3
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))
    if kind == "SGD":
        torch.manual_seed(0)
        start = torch.nn.Embedding(4, 2).weight.detach()
        rows = torch.tensor([0.1, 0.1, 0, 0.2]) / 2  # both in step 1, rank 0 in step 2, rank 1 in step 4
        rows = rows + torch.tensor([0.1, 0, 0, 0.1]) / 2 + torch.tensor([0, 0.1, 0, 0.1]) / 2
        torch.testing.assert_close(first[0], start - rows.unsqueeze(1))


def test_a_gradient_that_turns_sparse_or_dense_later_keeps_the_ranks_together(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        weight = torch.nn.Parameter(torch.zeros(3, 2))
        other = torch.nn.Parameter(torch.zeros(3, 2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, other], lr=1.0), named([weight, other]))
        found = []
        for step in range(4):
            optimizer.zero_grad()
            # The first is dense in the first step, the second sparse; later both change on one rank only.
            sparse = (step > 0) == (hvd.rank() == 0)
            row = torch.tensor([hvd.rank()])
            torch.nn.functional.embedding(row, weight, sparse=step > 0 and sparse).sum().backward()
            torch.nn.functional.embedding(row, other, sparse=step == 0 or not sparse).sum().backward()
            optimizer.synchronize()
            found.append([p.grad.to_dense()[:, 1].tolist() for p in (weight, other)])
        return found

    assert two(fn) == [[[[0.5, 0.5, 0.0]] * 2] * 4] * 2


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_compression_predivision_and_groups_also_count_for_sparse_gradients(two: Any, op: str) -> None:
    def fn(hvd: Any) -> Any:
        embedding = torch.nn.Embedding(3, 2, sparse=True)
        dense = torch.nn.Parameter(torch.zeros(1))
        options: dict[str, Any] = {"compression": hvd.Compression.fp16, "op": getattr(hvd, op)}
        if op == "Average":
            options["gradient_predivide_factor"] = 2.0
        named = [("e", embedding.weight), ("d", dense)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([embedding.weight, dense], lr=1.0), named, **options)
        (embedding(torch.tensor([hvd.rank()])).sum() * 3 + dense.sum()).backward()
        optimizer.synchronize()
        assert embedding.weight.grad.dtype == torch.float32
        grouped = hvd.DistributedOptimizer(
            torch.optim.SGD([embedding.weight, dense], lr=1.0), named, groups=[[embedding.weight, dense]], **options
        )
        del optimizer
        embedding.weight.grad = dense.grad = None
        (embedding(torch.tensor([hvd.rank()])).sum() * 3 + dense.sum()).backward()
        grouped.synchronize()
        assert not embedding.weight.grad.is_sparse
        return embedding.weight.grad[:, 0].tolist(), dense.grad.item()

    expected = ([1.5, 1.5, 0.0], 1.0) if op == "Average" else ([3.0, 3.0, 0.0], 2.0)
    assert two(fn) == [expected] * 2


def test_a_compressor_of_one_s_own_that_keeps_the_type_also_counts_for_sparse_gradients(two: Any) -> None:
    def fn(hvd: Any) -> Any:
        from hvd_cluster.torch.compression import Compressor

        class Rounded(Compressor):
            """Sends multiples of 8 only, as a count of eighths would."""

            @staticmethod
            def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
                return (tensor / 8).round(), 8.0

            @staticmethod
            def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
                return tensor * ctx

        embedding, dense = torch.nn.Embedding(2, 1, sparse=True), torch.nn.Parameter(torch.zeros(2))
        named = [("e", embedding.weight), ("d", dense)]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([embedding.weight, dense], lr=1.0), named, compression=Rounded, op=hvd.Sum
        )
        mine = torch.tensor([9.0, 14.0 + hvd.rank()])
        ((embedding(torch.arange(2)).flatten() + dense) * mine).sum().backward()
        optimizer.synchronize()
        return embedding.weight.grad.to_dense().flatten().tolist(), dense.grad.tolist()

    assert two(fn) == [([16.0, 32.0], [16.0, 32.0])] * 2


def test_sparse_values_are_sent_as_they_are_if_a_compressor_changes_their_shape(two: Any) -> None:
    def fn(hvd: Any) -> Any:
        from hvd_cluster.torch.compression import Compressor

        class Flat(Compressor):
            """Sends one dimension, of half as many numbers: the first of each pair."""

            @staticmethod
            def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
                return tensor.reshape(-1)[::2] / 8, tensor.shape

            @staticmethod
            def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
                return tensor.repeat_interleave(2).reshape(ctx) * 8

        embedding, dense = torch.nn.Embedding(4, 2, sparse=True), torch.nn.Parameter(torch.zeros(2))
        named = [("e", embedding.weight), ("d", dense)]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([embedding.weight, dense], lr=1.0), named, compression=Flat, op=hvd.Sum
        )
        rows = torch.tensor([3, 1, 0][: 1 + 2 * hvd.rank()])
        ((embedding(rows).sum(dim=0) + dense) * torch.tensor([8.0, 16.0])).sum().backward()
        optimizer.synchronize()
        return embedding.weight.grad.to_dense().tolist(), dense.grad.tolist()

    one, none = [8.0, 16.0], [0.0, 0.0]
    assert two(fn) == [([one, one, none, [16.0, 32.0]], [16.0, 16.0])] * 2


def test_shapes_and_types_may_change_between_steps(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        x = torch.full((1, 2), hvd.rank() + 1.0)
        found = []
        for change in (None, torch.float64, torch.bfloat16, torch.float32, "wider"):
            if change == "wider":
                net[1].weight.data, net[1].bias.data = torch.ones(3, 2), torch.zeros(3)
            elif change is not None:
                net.to(change)
            optimizer.zero_grad()
            net(x.to(net[0].weight.dtype)).sum().backward()
            optimizer.step()
            found.append((net[1].weight.grad.dtype, net[1].bias.grad.tolist(), net[1].weight.detach().clone()))
        return found

    first, second = two(fn)
    for mine, theirs in zip(first, second, strict=True):
        assert torch.equal(mine[2], theirs[2])
    assert [entry[0] for entry in first] == [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float32,
        torch.float32,
    ]
    assert first[-1][1] == [1.0] * 3


def test_parameters_are_frozen_and_unfrozen_between_steps(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        parameters = scalars(3)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0), named(parameters))
        found = []
        for frozen in ["", "0", "012", "2", ""]:
            optimizer.zero_grad()
            for i, parameter in enumerate(parameters):
                parameter.requires_grad_(str(i) not in frozen)
            loss = sum(parameter.sum() for parameter in parameters) * (hvd.rank() + 1)
            if loss.requires_grad:
                loss.backward()
            optimizer.step()
            found.append([None if p.grad is None else p.grad[0].item() for p in parameters])
        return found

    expected = [[1.5] * 3, [None, 1.5, 1.5], [None] * 3, [1.5, 1.5, None], [1.5] * 3]
    assert two(fn) == [expected] * 2


def test_what_is_frozen_on_one_rank_only_gets_the_average_with_zeros(two: Any) -> None:
    steps = [("0", ""), ("", ""), ("1", "2"), ("1", "1"), ("3", ""), ("3", "3"), ("", "")]

    def fn(hvd: Any) -> tuple[list[Any], list[float]]:
        parameters = [*scalars(3), torch.nn.Parameter(torch.zeros(4, 1))]
        optimizer = torch.optim.SGD(parameters, lr=1.0, momentum=0.5)
        optimizer = hvd.DistributedOptimizer(optimizer, named(parameters))
        found = []
        for frozen in steps:
            optimizer.zero_grad()
            for i, parameter in enumerate(parameters):
                parameter.requires_grad_(str(i) not in frozen[hvd.rank()])
            loss = sum(parameter.sum() * 10**i for i, parameter in enumerate(parameters[:3])) * (hvd.rank() + 1)
            (loss + torch.nn.functional.embedding(torch.tensor([0]), parameters[3], sparse=True).sum()).backward()
            optimizer.step()
            found.append([None if p.grad is None else p.grad.to_dense().flatten()[0].item() for p in parameters])
        return found, [p.flatten()[0].item() for p in parameters]

    (found, weights), second = two(fn)
    assert found == [
        [1.0, 15.0, 150.0, 1.0],
        [1.5, 15.0, 150.0, 1.0],
        [1.5, 10.0, 50.0, 1.0],
        [1.5, None, 150.0, 1.0],
        [1.5, 15.0, 150.0, 0.5],
        [1.5, 15.0, 150.0, None],
        [1.5, 15.0, 150.0, 1.0],
    ]
    assert second == (found, weights)


def test_a_rank_that_keeps_a_part_of_a_bucket_frozen_makes_the_others_requests(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        parameters = scalars(2)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0), named(parameters))
        found = []
        for frozen in ["", "1", "1", "1", ""]:
            optimizer.zero_grad()
            parameters[1].requires_grad_(hvd.rank() == 0 or not frozen)
            (sum(parameter.sum() for parameter in parameters) * (hvd.rank() + 1)).backward()
            optimizer.step()
            found.append([p.grad[0].item() for p in parameters])
        assert hvd.allreduce(torch.ones(1), name="after", op=hvd.Sum).item() == 2.0
        return found

    assert two(fn) == [[[1.5, 1.5], *[[1.5, 0.5]] * 3, [1.5, 1.5]]] * 2


def test_what_one_rank_has_frozen_is_reduced_while_another_rank_has_joined(three: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        parameters = scalars(2)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0), named(parameters), op=hvd.Sum)
        found = []
        for _ in range(2 if hvd.rank() < 2 else 0):  # rank 2 has no data: no plan holds for longer than a step
            optimizer.zero_grad()
            parameters[1].requires_grad_(hvd.rank() == 0)
            sum(parameter.sum() for parameter in parameters).backward()
            optimizer.step()
            found.append([p.grad[0].item() for p in parameters])
        hvd.join()
        return found

    assert three(fn) == [[[2.0, 1.0]] * 2, [[2.0, 1.0]] * 2, []]


def test_conjugated_gradients_are_reduced(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        parameters = [torch.nn.Parameter(torch.tensor([1.0 + 1.0j])), torch.nn.Parameter(torch.tensor([1.0 + 2.0j]))]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0), named(parameters))
        factor = torch.tensor([[2.0 + 1.0j]]) * (hvd.rank() + 1)
        for _ in range(2):
            optimizer.zero_grad()
            ((factor @ parameters[0].conj()).sum() + (parameters[1].conj() * factor).sum()).abs().backward()
            own = [parameter.grad.clone() for parameter in parameters]
            optimizer.step()
        gathered = [hvd.allgather(torch.view_as_real(gradient.resolve_conj())) for gradient in own]
        return [
            torch.allclose(torch.view_as_real(parameter.grad.resolve_conj()), of_all.mean(0, keepdim=True))
            for parameter, of_all in zip(parameters, gathered, strict=True)
        ]

    assert two(fn) == [[True, True]] * 2


def test_a_rank_that_has_frozen_all_of_a_bucket_takes_part_with_zeros(two: Any) -> None:
    steps = [("", ""), ("0", ""), ("", ""), ("0", "0"), ("", "0")]

    def fn(hvd: Any) -> tuple[list[Any], list[float]]:
        (parameter,) = parameters = scalars(1)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), named(parameters))
        found = []
        for step, frozen in enumerate(steps):
            optimizer.zero_grad()
            parameter.requires_grad_(frozen[hvd.rank()] != "0")
            if parameter.requires_grad:
                (parameter.sum() * 10**step).backward()
            optimizer.step()
            found.append(None if parameter.grad is None else parameter.grad[0].item())
        return found, parameter.tolist()

    first, second = two(fn)
    assert first == second
    assert first[0] == [1.0, 5.0, 100.0, None, 5000.0]


def test_what_no_one_uses_and_one_rank_has_frozen_is_reduced_when_it_is_used(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        parameters = scalars(2)
        parameters[0].requires_grad_(hvd.rank() == 0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0), named(parameters))
        found = []
        for step in range(4):
            optimizer.zero_grad()
            if step == 2:
                parameters[0].requires_grad_(True)
            (sum(p.sum() for p in parameters[step < 2 :]) * (hvd.rank() + 1)).backward()
            optimizer.step()
            found.append([None if p.grad is None else p.grad[0].item() for p in parameters])
        return found

    assert two(fn) == [[[0.0, 1.5]] * 2 + [[1.5, 1.5]] * 2] * 2


@pytest.mark.parametrize("op", ["Average", "Min", "Max", "Product"])
@pytest.mark.parametrize("options", [{"momentum": 0.9}, {"weight_decay": 0.1}], ids=lambda options: next(iter(options)))
def test_gradients_of_zeros_move_what_one_rank_has_frozen_on_all_ranks_or_on_none(
    two: Any, options: dict[str, float], op: str
) -> None:
    def fn(hvd: Any) -> Any:
        dense, sparse, never = [torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float64)) for _ in range(3)]
        parameters = [torch.nn.Parameter(torch.ones(2)), dense, never]
        if op == "Average" and "momentum" in options:  # weight decay does not take sparse gradients
            parameters.append(sparse)
        optimizer = torch.optim.SGD(parameters, lr=0.1, **options)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named(parameters), op=getattr(hvd, op), compression=hvd.Compression.fp16
        )
        found = []
        for step in range(6):
            optimizer.zero_grad()
            for parameter in parameters[1:]:
                parameter.requires_grad_(hvd.rank() == 1 or step in (0, 4))
                if step == 5:
                    parameter.requires_grad_(False)
            loss = parameters[0].sum()
            if step == 0:
                loss = loss + dense.sum()
                if len(parameters) == 4:
                    loss = loss + torch.nn.functional.embedding(torch.tensor([0, 1]), sparse, sparse=True).sum()
            loss.backward()
            optimizer.step()
            found.append([parameter.grad is None for parameter in parameters])
        return found, [parameter.tolist() for parameter in parameters]

    (found, weights), second = two(fn)
    assert second == (found, weights)
    assert [row[1:] for row in found] == [[False] * (len(found[0]) - 1)] * 5 + [[True] * (len(found[0]) - 1)]


def test_a_rank_without_a_backward_pass_repeats_what_another_rank_has_frozen_in_part(two: Any) -> None:
    def fn(hvd: Any) -> list[list[float]]:
        parameters = scalars(3)  # no rank uses the last one, so the ranks agree in every step
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.0), named(parameters))
        found = []
        for step in range(3):
            optimizer.zero_grad()
            parameters[0].requires_grad_(step == 0 or hvd.rank() == 0)
            if step == 0 or hvd.rank() == 1:
                (parameters[0] + parameters[1]).sum().backward()
            optimizer.step()
            found.append([p.grad[0].item() for p in parameters[1:]])
        return found

    assert two(fn) == [[[1.0, 0.0], [0.5, 0.0], [0.5, 0.0]]] * 2


def test_strided_and_complex_gradients_are_reduced(two: Any) -> None:
    def fn(hvd: Any) -> Any:
        image = torch.nn.Parameter(torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last))
        wave = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([image, wave], lr=1.0), named([image, wave]))
        for _ in range(2):
            optimizer.zero_grad()
            ((image * (hvd.rank() + 1)).sum() + (wave * (1j * hvd.rank())).sum().imag).backward()
            optimizer.synchronize()
        return image.grad.unique().tolist(), image.grad.stride(), wave.grad.tolist()

    (values, stride, wave), second = two(fn)
    assert values == [1.5]
    assert stride == (12, 1, 6, 3)
    assert wave == [0.5, 0.5]
    assert second == (values, stride, wave)


def test_parameters_that_are_added_later_are_reduced_too(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        parameters = scalars(2)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters[:1], lr=1.0), named(parameters[:1]))
        for _ in range(3):
            optimizer.zero_grad()
            (sum(p.sum() for p in parameters) * (hvd.rank() + 1)).backward()
            optimizer.step()
            if len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": parameters[1:], "lr": 2.0})
        return [p.tolist() for p in parameters]

    assert two(fn) == [[[-3.5, -3.5], [-5.0, -5.0]]] * 2


@pytest.mark.parametrize("way", ["append", "replace", "original"])
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_parameters_that_groups_get_without_add_param_group_are_reduced_too(two: Any, way: str, op: str) -> None:
    def fn(hvd: Any) -> list[Any]:
        first, second = scalars(2)
        original = torch.optim.SGD([first], lr=1.0)
        optimizer = hvd.DistributedOptimizer(original, named([first]), op=getattr(hvd, op))
        for step in range(3):
            optimizer.zero_grad()
            ((first.sum() + second.sum()) * (hvd.rank() + 1)).backward()
            optimizer.step()
            if step > 0:
                continue
            if way == "append":
                optimizer.param_groups[0]["params"].append(second)
            elif way == "replace":  # as Lightning does when it resumes a fit with unfrozen layers
                optimizer.param_groups = [{**optimizer.param_groups[0], "params": [second]}]
            else:
                original.add_param_group({"params": [second]})
            second.grad = None
        return [first.tolist(), second.tolist()]

    gradient = 1.5 if op == "Average" else 3.0
    values = [1.0 - (1 if way == "replace" else 3) * gradient, 1.0 - 2 * gradient]
    assert two(fn) == [[[value] * 2 for value in values]] * 2


def test_gradients_are_reduced_before_they_are_copied_to_master_parameters(two: Any) -> None:
    """As with apex, which replaces the parameters in the groups at its opt_level O2."""

    def fn(hvd: Any) -> Any:
        (parameter,) = scalars(1, 0.0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), named([parameter]))
        master = parameter.detach().double().requires_grad_()
        optimizer.param_groups[0]["params"][0] = master
        for _ in range(3):
            parameter.grad = None
            optimizer.zero_grad()
            (parameter.sum() * (hvd.rank() + 1)).backward()
            optimizer.synchronize()
            master.grad = parameter.grad.double()
            with optimizer.skip_synchronize():
                optimizer.step()
            parameter.data.copy_(master.data)
        return master.tolist()

    assert two(fn) == [[-4.5, -4.5]] * 2


def test_a_rank_may_reorder_its_groups_between_steps(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        parameters = scalars(2, 0.0)
        groups = [{"params": [parameter]} for parameter in parameters]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=1.0), named(parameters))
        for step in range(3):
            optimizer.zero_grad()
            ((parameters[0].sum() + parameters[1].sum()) * (hvd.rank() + 1)).backward()
            optimizer.step()
            if step == hvd.rank() == 1:
                optimizer.param_groups.reverse()
        return [p.tolist() for p in parameters]

    assert two(fn) == [[[-4.5, -4.5]] * 2] * 2


def test_ranks_that_ran_out_of_data_join(three: Any) -> None:
    """Rank 2 has no step in the first epoch, in which the others agree on nothing that would outlast it."""

    def fn(hvd: Any) -> list[Any]:
        parameters = scalars(2, 0.0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), named(parameters))
        for epoch, steps in enumerate([[3, 2, 0], [2, 2, 4], [1, 3, 2]]):
            for _ in range(steps[hvd.rank()]):
                optimizer.zero_grad()
                (parameters[0].sum() + (parameters[1].sum() if epoch else 0)).backward()
                optimizer.step()
            hvd.join()
            hvd.broadcast_parameters(named(parameters), root_rank=2 if epoch else 0)
        return [p.tolist() for p in parameters]

    # Epochs: 3 + 2 + 0, 2 + 2 + 4 and 1 + 3 + 2 steps; rank 2's weights count after the second and third.
    (first, _, _) = results = three(fn)
    assert results == [first] * 3
    torch.testing.assert_close(torch.tensor(first[0]), torch.full((2,), -(5 + 8 + 5) / 3))


def test_process_sets_train_apart(four: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        hvd.shutdown()
        sets = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 3])]
        hvd.init(process_sets=sets)
        parameters = scalars(2, 0.0)
        weights = named(parameters)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=1.0), weights, process_set=sets[hvd.rank() // 2]
        )
        stranger = hvd.DistributedOptimizer(
            torch.optim.SGD(scalars(1), lr=1.0), process_set=sets[1 - hvd.rank() // 2], groups=2
        )
        for _ in range(3):
            optimizer.zero_grad()
            (sum(p.sum() for p in parameters) * (hvd.rank() + 1)).backward()
            optimizer.step()
        stranger.param_groups[0]["params"][0].sum().backward()
        stranger.step()
        hvd.barrier()  # the other set may not be done
        hvd.shutdown()
        hvd.init()
        return [parameters[0][0].item(), stranger.param_groups[0]["params"][0][0].item()]

    assert four(fn) == [[-4.5, 0.0], [-4.5, 0.0], [-10.5, 0.0], [-10.5, 0.0]]


def test_parameters_of_different_shapes_are_named_on_all_ranks(two: Any) -> None:
    def fn(hvd: Any) -> tuple[str, float]:
        width = 2 + hvd.rank()
        parameters = {
            "common": torch.nn.Parameter(torch.ones(4)),
            "frozen": torch.nn.Parameter(torch.ones(width), requires_grad=False),  # it does not travel
            "wide": torch.nn.Parameter(torch.ones(3, width)),
            "late": torch.nn.Parameter(torch.ones(2, dtype=torch.float64 if hvd.rank() else torch.float32)),
        }
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters.values(), lr=1.0), parameters.items())
        # Rank 1 alone has a gradient for one of them.
        loss = sum(p.sum() for name, p in parameters.items() if name != "late" or hvd.rank())
        with pytest.raises(ValueError, match="different shapes or dtypes on different ranks") as caught:
            loss.backward()
        del optimizer
        return str(caught.value), hvd.allreduce(torch.ones(1), op=hvd.Sum).item()  # the engine goes on

    (first, of_first), (second, of_second) = two(fn)
    assert "on this rank 'late' is float32 [2], 'wide' is float32 [3, 2]: make the same model" in first
    assert "on this rank 'late' is float64 [2], 'wide' is float32 [3, 3]: make the same model" in second
    assert of_first == of_second == 2.0


def test_a_plan_does_not_outlive_its_world(two: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        parameters = scalars(2, 0.0)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), named(parameters))
        for world in range(2):
            if world and hvd.rank() == 1:  # a new worker in the place of the old one
                parameters = scalars(2, parameters[0][0].item())
                optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), named(parameters))
            for _ in range(2):
                optimizer.zero_grad()
                (sum(p.sum() for p in parameters) * (hvd.rank() + 1)).backward()
                optimizer.step()
            hvd.shutdown()
            hvd.init()
        return [p[0].item() for p in parameters]

    assert two(fn) == [[-6.0, -6.0]] * 2


def test_optimizers_over_different_parameters_are_an_error_not_a_stall(two: Any) -> None:
    def fn(hvd: Any) -> float:
        parameters = scalars(1)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=1.0), [(f"weight of rank {hvd.rank()}", parameters[0])]
        )
        with pytest.raises(ValueError, match="different names on different ranks"):
            parameters[0].sum().backward()
        del optimizer
        return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()  # the engine goes on

    assert two(fn) == [2.0] * 2


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="gradients have the dtype of their parameter")
@pytest.mark.parametrize("is_frozen", [False, True])
def test_gradients_of_another_dtype_than_their_parameter_are_reduced(two: Any, is_frozen: bool) -> None:
    def fn(hvd: Any) -> Any:
        half, never = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2)]
        parameters = [half, never, *scalars(1)]
        for parameter in (half, never):
            parameter.grad_dtype = torch.float32
        optimizer = torch.optim.SGD(parameters, lr=0.25)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, named(parameters))
        for step in range(4):
            optimizer.zero_grad()
            half.requires_grad_(not (is_frozen and step > 0 and hvd.rank() == 1))
            loss = parameters[2].sum()
            if hvd.rank() == 0 or step == 1:
                loss = loss + half.float().sum()
            loss.backward()
            optimizer.step()
        return [str(parameter.grad.dtype) for parameter in parameters], half.tolist()

    average = [1.0 - 0.25 * (0.5 * 4 + 0.5 * (not is_frozen))] * 3
    assert two(fn) == [(["torch.float32"] * 3, average)] * 2


def test_a_deleted_optimizer_leaves_no_hooks_on_its_parameters(two: Any) -> None:
    def fn(hvd: Any) -> list[int]:
        parameters = scalars(2)
        counts = []
        for _ in range(3):
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), named(parameters))
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
            counts.append(len(parameters[0]._post_accumulate_grad_hooks))
            del optimizer
        counts.append(len(parameters[0]._post_accumulate_grad_hooks))
        return counts

    assert two(fn) == [[1, 1, 1, 0]] * 2


@pytest.mark.parametrize("kind", ["first step", "short step", "frozen on one rank", "sparse"])
def test_a_step_that_a_signal_handler_interrupts_can_be_repeated(two: Any, kind: str) -> None:
    class Interruption(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interruption

    def fn(hvd: Any) -> Any:
        parameters = [torch.nn.Parameter(torch.zeros(3, 2)) for _ in range(2)]
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        optimizer = hvd.DistributedOptimizer(optimizer, named(parameters), backward_passes_per_step=2)

        def backward() -> None:
            if kind == "sparse":
                torch.nn.functional.embedding(torch.tensor([0, 1]), parameters[0], sparse=True).sum().backward()
            (sum(parameter.sum() for parameter in parameters if parameter.requires_grad) * (hvd.rank() + 1)).backward()

        if kind != "first step":
            if kind == "frozen on one rank":
                backward()
            backward()
            optimizer.step()
            optimizer.zero_grad()
        if kind == "frozen on one rank":
            parameters[1].requires_grad_(hvd.rank() == 1)
        (sum(parameter.sum() for parameter in parameters if parameter.requires_grad) * (hvd.rank() + 1)).backward()
        interruptions = 0
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            if hvd.rank() == 1:
                time.sleep(0.6)
            else:
                signal.setitimer(signal.ITIMER_REAL, 0.2)
            for _ in range(2):
                try:
                    optimizer.step()
                    break
                except Interruption:
                    interruptions += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        return interruptions, [p.tolist() for p in parameters]

    (count, weights), (other, others) = two(fn)
    assert (count, other) == (1, 0)
    assert weights == others


@pytest.mark.parametrize(
    ("where", "first_passes"), [("while it packs", 2), ("after the last agreement", 2), ("after the last agreement", 1)]
)
def test_a_step_that_has_failed_on_one_rank_sends_each_request_once(two: Any, where: str, first_passes: int) -> None:
    def fn(hvd: Any) -> Any:
        from hvd_cluster.torch import Compression

        errors: list[str] = []

        class Fails(Compression.none):
            @staticmethod
            def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
                if errors and where == "while it packs":
                    raise torch.OutOfMemoryError(errors.pop())
                return tensor, None

            @staticmethod
            def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
                if errors:
                    raise torch.OutOfMemoryError(errors.pop())
                return tensor

        dense, never, rows = torch.nn.Parameter(torch.zeros(3)), *(torch.nn.Parameter(torch.zeros(2, 3)) for _ in "ab")
        optimizer = torch.optim.SGD([dense, never, rows], lr=1.0)
        optimizer = hvd.DistributedOptimizer(
            optimizer, named([dense, never, rows]), compression=Fails, backward_passes_per_step=2
        )
        caught = 0
        for step in range(4):
            for _ in range(1 if step else first_passes):  # those of the other steps are sent in step()
                used = torch.nn.functional.embedding(torch.tensor([1]), rows, sparse=True)
                ((dense.sum() + used.sum()) * (hvd.rank() + 1)).backward()
            errors[:] = ["for the test"] if hvd.rank() == 0 and step in (first_passes - 1, 2) else []
            for _ in range(2):
                try:
                    optimizer.step()
                    break
                except torch.OutOfMemoryError:
                    caught += 1
            optimizer.zero_grad()
        return caught, dense.tolist(), rows.tolist()

    (caught, *weights), (none, *others) = two(fn)
    assert (caught, none) == (2, 0)
    assert weights == others
    assert weights[0] == [-1.5 * (first_passes + 3)] * 3


def test_an_optimizer_that_is_gone_sends_nothing(two: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        parameters = scalars(1, 0.0)
        for _ in range(3):
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), named(parameters))
            for _ in range(2):
                optimizer.zero_grad()
                (parameters[0].sum() * (hvd.rank() + 1)).backward()
                optimizer.step()
        return parameters[0].tolist()

    assert two(fn) == [[-9.0, -9.0]] * 2


def test_two_living_optimizers_over_one_parameter_are_refused(two: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        parameters = scalars(2, 0.0)
        first = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), named(parameters))
        second = hvd.DistributedOptimizer(torch.optim.SGD(parameters[1:], lr=1.0), named(parameters)[1:])
        with pytest.raises(ValueError, match=r"'p1' is a parameter of two DistributedOptimizers.* delete the one"):
            (parameters[0] + parameters[1]).sum().backward()
        hvd.barrier()
        del first  # it may have sent the gradient of p0
        second.zero_grad()
        (parameters[1].sum() * (hvd.rank() + 1)).backward()
        second.step()
        return parameters[1].tolist()

    assert two(fn) == [[-1.5, -1.5]] * 2


@pytest.mark.parametrize("kind", ["unfrozen later", "a step before the first pass"])
def test_gradients_that_are_first_seen_later_share_buckets_like_the_first_ones(two: Any, kind: str) -> None:
    def fn(hvd: Any) -> tuple[list[int], list[float]]:
        from hvd_cluster.torch import transfers

        parameters = [torch.nn.Parameter(torch.zeros(1 << 18)) for _ in range(8)]  # 1 MiB each
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0), named(parameters))
        if kind == "unfrozen later":
            for parameter in parameters[1:]:
                parameter.requires_grad_(False)
        else:
            optimizer.step()
        requests: list[int] = []
        original = transfers.submit
        transfers.submit = lambda kind, tensors, **options: (
            requests.append(len(tensors)) or original(kind, tensors, **options)
        )
        try:
            for _ in range(3):
                requests.clear()
                optimizer.zero_grad()
                sum(parameter.sum() for parameter in parameters).backward()
                optimizer.step()
                for parameter in parameters:
                    parameter.requires_grad_(True)
        finally:
            transfers.submit = original
        return requests, [parameter[0].item() for parameter in parameters]

    for requests, values in two(fn):
        assert sum(requests) == 8
        assert max(requests) <= 4, requests
        assert values == ([-3.0] + [-2.0] * 7 if kind == "unfrozen later" else [-3.0] * 8)


def test_workers_that_come_between_the_passes_of_a_step_do_not_wait_for_its_rest(two: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        parameters = scalars(1, 0.0)

        def wrap() -> Any:
            return hvd.DistributedOptimizer(
                torch.optim.SGD(parameters, lr=1.0), named(parameters), backward_passes_per_step=2
            )

        def backward() -> None:
            (parameters[0].sum() * (hvd.rank() + 1)).backward()

        optimizer = wrap()
        for passes in (2, 1):
            optimizer.zero_grad()
            for _ in range(passes):
                backward()
            if passes == 2:
                optimizer.step()
        # What an elastic job does when workers are added after the first of two passes.
        hvd.shutdown()
        hvd.init()
        if hvd.rank() == 1:  # only those that receive the state load it
            optimizer.load_state_dict(optimizer.state_dict())
        parameters[0].grad = None
        for _ in range(2):
            backward()
        optimizer.step()
        return parameters[0].tolist()

    assert two(fn) == [[-6.0, -6.0]] * 2
