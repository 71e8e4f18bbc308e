"""SyncBatchNorm on real ranks: the numbers are those of BatchNorm over the concatenated batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hvd_cluster.torch as hvd


def batch(rows: int, shape: tuple[int, ...] = (4, 5), dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(rows, *shape, generator=generator, dtype=torch.float64) * 3 + 100).to(dtype)


@pytest.mark.parametrize("sizes", [[4, 4, 4], [1, 6, 2], [5, 0, 3]], ids=str)
def test_both_passes_are_those_of_one_batch(three: Any, sizes: list[int]) -> None:
    def fn(hvd: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        norm = hvd.SyncBatchNorm(4, momentum=0.3, dtype=torch.float64)
        torch.nn.init.normal_(norm.weight)
        torch.nn.init.normal_(norm.bias)
        everything = batch(sum(sizes))
        mine = everything.split(sizes)[hvd.rank()].clone().requires_grad_()
        for _ in range(2):
            output = norm(mine)
        (output**3).sum().backward()
        return {
            "output": output.detach(),
            "input": mine.grad,
            "weight": hvd.allreduce(norm.weight.grad, op=hvd.Sum),
            "bias": hvd.allreduce(norm.bias.grad, op=hvd.Sum),
            "mean": norm.running_mean,
            "variance": norm.running_var,
            "tracked": norm.num_batches_tracked,
        }

    torch.manual_seed(1)
    peer = torch.nn.BatchNorm1d(4, momentum=0.3, dtype=torch.float64)
    torch.nn.init.normal_(peer.weight)
    torch.nn.init.normal_(peer.bias)
    x = batch(sum(sizes)).requires_grad_()
    for _ in range(2):
        expected = peer(x)
    (expected**3).sum().backward()
    results = three(fn)
    torch.testing.assert_close(torch.cat([result["output"] for result in results]), expected.detach())
    torch.testing.assert_close(torch.cat([result["input"] for result in results]), x.grad)
    for result in results:
        torch.testing.assert_close(result["weight"], peer.weight.grad)
        torch.testing.assert_close(result["bias"], peer.bias.grad)
        torch.testing.assert_close(result["mean"], peer.running_mean)
        torch.testing.assert_close(result["variance"], peer.running_var)
        assert result["tracked"] == 2


def test_options_and_evaluation_are_those_of_batch_norm(two: Any) -> None:
    cases: list[dict[str, Any]] = [
        {"affine": False},
        {"track_running_stats": False},
        {"momentum": None},
        {"eps": 0.1, "affine": False, "track_running_stats": False},
    ]

    def fn(hvd: Any) -> list[Any]:
        everything = batch(6, (4, 3, 2), torch.float32)
        results = []
        for options in cases:
            norm = hvd.SyncBatchNorm(4, **options)
            mine = everything.split([2, 4])[hvd.rank()]
            norm(mine * 2)
            trained = norm(mine)
            norm.eval()
            same_everywhere = norm(everything)
            results.append((trained.detach(), same_everywhere.detach(), list(norm.state_dict())))
        return results

    first, second = two(fn)
    x = batch(6, (4, 3, 2), torch.float32)
    for options, mine, theirs in zip(cases, first, second, strict=True):
        peer = torch.nn.BatchNorm2d(4, **options)
        peer(x * 2)
        trained = peer(x)
        peer.eval()
        torch.testing.assert_close(torch.cat([mine[0], theirs[0]]), trained.detach(), rtol=1e-4, atol=1e-4)
        if options.get("track_running_stats", True):
            for result in (mine, theirs):
                torch.testing.assert_close(result[1], peer(x).detach(), rtol=1e-4, atol=1e-4)
        assert mine[2] == theirs[2] == list(peer.state_dict())


def test_a_converted_model_trains_to_the_weights_of_one_process(two: Any) -> None:
    def net() -> torch.nn.Module:
        torch.manual_seed(0)
        layers = [torch.nn.Conv2d(1, 3, 2), torch.nn.BatchNorm2d(3), torch.nn.ReLU(), torch.nn.Flatten()]
        return torch.nn.Sequential(*layers, torch.nn.Linear(12, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))

    def data(step: int) -> torch.Tensor:
        return torch.randn(8, 1, 3, 3, generator=torch.Generator().manual_seed(step))

    def fn(hvd: Any) -> dict[str, torch.Tensor]:
        model = hvd.SyncBatchNorm.convert_sync_batchnorm(net())
        assert [type(m).__name__ for m in model].count("SyncBatchNorm") == 2
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
        )
        for step in range(4):
            optimizer.zero_grad()
            model(data(step)[4 * hvd.rank() :][:4]).square().mean().backward()
            optimizer.step()
        return {name: value.detach() for name, value in model.state_dict().items()}

    peer = net()
    optimizer = torch.optim.SGD(peer.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        optimizer.zero_grad()
        peer(data(step)).square().mean().backward()
        optimizer.step()
    for result in two(fn):
        for name, value in peer.state_dict().items():
            torch.testing.assert_close(result[name], value, rtol=1e-3, atol=1e-4)


def test_a_layer_with_several_names_is_converted_to_one_layer(two: Any) -> None:
    def fn(hvd: Any) -> str:
        model = torch.nn.Module()
        model.first = torch.nn.BatchNorm1d(3)
        model.second = model.first
        model.part = torch.nn.Sequential(model.first)
        model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
        assert model.first is model.second is model.part[0]
        return type(model.first).__name__

    assert two(fn) == ["SyncBatchNorm"] * 2


class NormAndActivation(torch.nn.BatchNorm1d):
    """As timm's BatchNormAct2d."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


def test_a_conversion_that_loses_a_part_of_a_layer_warns() -> None:
    with pytest.warns(UserWarning, match=r"NormAndActivation has its own forward\(\).*is lost"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(NormAndActivation(3)))
    plain = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.BatchNorm3d(3), torch.nn.SyncBatchNorm(3))
    assert [type(layer) for layer in hvd.SyncBatchNorm.convert_sync_batchnorm(plain)] == [hvd.SyncBatchNorm] * 3


def test_a_lazy_layer_is_converted_after_its_first_batch_only() -> None:
    model = torch.nn.Sequential(torch.nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match="LazyBatchNorm1d does not know its size yet: run one batch"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    model(torch.zeros(2, 3))
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(model)[0].num_features == 3


def test_one_rank_may_evaluate_without_running_statistics(two: Any) -> None:
    def fn(hvd: Any) -> torch.Tensor | None:
        norm = hvd.SyncBatchNorm(4, track_running_stats=False).eval()
        return norm(batch(3, (4,), torch.float32)).detach() if hvd.rank() == 0 else None

    peer = torch.nn.BatchNorm1d(4, track_running_stats=False).eval()
    torch.testing.assert_close(two(fn)[0], peer(batch(3, (4,), torch.float32)).detach())


def test_half_precision_is_normalised_in_float32(two: Any) -> None:
    def fn(hvd: Any) -> tuple[torch.dtype, torch.Tensor]:
        mine = (batch(8, (4,)).float() * 100).to(torch.bfloat16).split(4)[hvd.rank()]  # squares would not add up
        norm = hvd.SyncBatchNorm(4)
        with torch.autocast("cpu", torch.bfloat16):
            output = norm(mine)
        return output.dtype, output.float().detach()

    (dtype, first), (_, second) = two(fn)
    assert dtype == torch.bfloat16
    x = (batch(8, (4,)).float() * 100).to(torch.bfloat16).float()
    expected = torch.nn.BatchNorm1d(4)(x).detach()
    torch.testing.assert_close(torch.cat([first, second]), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_in_half_precision_are_those_of_double_precision(two: Any, dtype: torch.dtype) -> None:
    num_rows = 70_000  # more than float16 can count, so the bias must not get its gradient in that type

    def rows(rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank)
        return (torch.randn(num_rows, 2, generator=generator) + rank).to(dtype)

    def fn(hvd: Any) -> list[torch.Tensor]:
        norm = hvd.SyncBatchNorm(2)
        torch.nn.init.constant_(norm.weight, 3.0)
        mine = rows(hvd.rank()).requires_grad_()
        with torch.autocast("cpu", dtype):
            output = norm(mine)
        assert output.dtype == dtype
        gradient = torch.ones_like(output)
        gradient[: num_rows // 2, 0] = 2.0
        output.backward(gradient)
        assert mine.grad.dtype == dtype
        return [norm.weight.grad, norm.bias.grad, mine.grad.double()]

    peer = torch.nn.BatchNorm1d(2, dtype=torch.float64)
    torch.nn.init.constant_(peer.weight, 3.0)
    x = torch.cat([rows(0), rows(1)]).double().requires_grad_()
    gradient = torch.ones(2, num_rows, 2, dtype=torch.float64)
    gradient[:, : num_rows // 2, 0] = 2.0
    peer(x).backward(gradient.view(2 * num_rows, 2))
    results = two(fn)
    for weight, bias, _ in results:
        assert weight.dtype == bias.dtype == torch.float32
        assert bias.tolist() == [1.5 * num_rows, num_rows]
    torch.testing.assert_close((results[0][0] + results[1][0]).double(), peer.weight.grad, rtol=1e-3, atol=0.5)
    found = torch.cat([result[2] for result in results])
    torch.testing.assert_close(found, x.grad, rtol=1e-2, atol=1e-2)


def test_two_of_three_ranks_share_their_statistics(three: Any) -> None:
    def fn(hvd: Any) -> list[torch.Tensor]:
        hvd.shutdown()
        pair = hvd.ProcessSet([0, 2])
        hvd.init(process_sets=[pair])
        norm = hvd.SyncBatchNorm(4, dtype=torch.float64, process_set=pair)
        mine = batch(9).split([2, 3, 4])[hvd.rank()].clone().requires_grad_()
        output = norm(mine)
        (output**3).sum().backward()
        found = [output.detach(), mine.grad, norm.weight.grad, norm.bias.grad, norm.running_var]
        hvd.barrier()  # the rank outside may be done before the others
        hvd.shutdown()
        hvd.init()
        return found

    def alone(*parts: torch.Tensor) -> list[torch.Tensor]:
        peer = torch.nn.BatchNorm1d(4, dtype=torch.float64)
        x = torch.cat(parts).clone().requires_grad_()
        output = peer(x)
        (output**3).sum().backward()
        return [output.detach(), x.grad, peer.weight.grad, peer.bias.grad, peer.running_var]

    first, outside, last = three(fn)
    parts = batch(9).split([2, 3, 4])
    torch.testing.assert_close(outside, alone(parts[1]))
    output, gradient, weight, bias, variance = alone(parts[0], parts[2])
    torch.testing.assert_close(torch.cat([first[0], last[0]]), output)
    torch.testing.assert_close(torch.cat([first[1], last[1]]), gradient)
    torch.testing.assert_close(first[2] + last[2], weight)
    torch.testing.assert_close(first[3] + last[3], bias)
    torch.testing.assert_close([first[4], last[4]], [variance, variance])


def test_wrong_input_is_refused_on_all_ranks(two: Any) -> None:
    def fn(hvd: Any) -> None:
        norm = hvd.SyncBatchNorm(4)
        with pytest.raises(ValueError, match="expected at least 2D input"):
            norm(torch.ones(4))
        with pytest.raises(ValueError, match="expected 4 channels"):
            norm(torch.ones(2, 3))
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            norm(torch.ones(1 - hvd.rank(), 4))
        assert torch.isfinite(norm(torch.ones(1, 4))).all()

    two(fn)


def test_a_world_of_one_and_ranks_outside_the_process_set_use_plain_batch_norm(two: Any) -> None:
    def fn(hvd: Any) -> torch.Tensor:
        alone = hvd.ProcessSet([hvd.rank()])
        norm = hvd.SyncBatchNorm(4, process_set=alone)
        if hvd.rank() == 1:
            norm = hvd.SyncBatchNorm(4, process_set=hvd.ProcessSet([0]))
            return norm(batch(3, (4,), torch.float32)).detach()
        norm.eval()
        return torch.nn.BatchNorm1d(4)(batch(3, (4,), torch.float32)).detach()

    first, second = two(fn)
    torch.testing.assert_close(first, second)
