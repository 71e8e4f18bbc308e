"""Parameters, optimizer state and objects from one rank to all."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from hvd_cluster.torch.functions import _target_devices
from hvd_cluster.torch.functions import _TensorIndex as At


def test_parameters_become_those_of_the_root_in_place(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        torch.manual_seed(hvd.rank())
        net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        addresses = [p.data_ptr() for p in net.parameters()]
        hvd.broadcast_parameters(net.state_dict(), root_rank=1)
        assert addresses == [p.data_ptr() for p in net.parameters()]
        strided = torch.full((2, 3), float(hvd.rank())).t()
        hvd.broadcast_parameters([strided, ("named", torch.zeros(1))], root_rank=1)
        return [net[0].weight.detach().clone(), strided.tolist()]

    (first, strided), (second, _) = two(fn)
    assert torch.equal(first, second)
    assert strided == [[1.0, 1.0]] * 3


def test_anything_but_a_dict_or_a_list_is_refused(two: Any) -> None:
    def fn(hvd: Any) -> None:
        with pytest.raises(ValueError, match="invalid params of type"):
            hvd.broadcast_parameters((p for p in [torch.ones(1)]), root_rank=0)

    two(fn)


def test_tensors_inside_of_entries_are_refused(two: Any) -> None:
    def fn(hvd: Any) -> None:
        net = torch.nn.Linear(2, 1)
        with pytest.raises(ValueError, match="the entry 'model' is a OrderedDict that contains tensors"):
            hvd.broadcast_parameters({"model": net.state_dict(), "scale": torch.ones(1)}, root_rank=0)
        with pytest.raises(ValueError, match="no entry is a tensor, but int, str"):
            hvd.broadcast_parameters({"epoch": 3, "name": "net"}, root_rank=0)
        hvd.broadcast_parameters({}, root_rank=0)
        hvd.broadcast_parameters({"layer._extra_state": {"scale": torch.ones(1)}}, root_rank=0)

    two(fn)


def test_extra_state_of_equal_shapes_is_broadcast(two: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        class Scaled(torch.nn.Linear):
            def get_extra_state(self) -> torch.Tensor:
                return scale

        scale = torch.full((2,), float(hvd.rank()))
        hvd.broadcast_parameters(Scaled(2, 1).state_dict(), root_rank=1)
        return scale.tolist()

    assert two(fn) == [[1.0, 1.0]] * 2


def test_extra_state_may_be_tensors_of_different_shapes_and_is_left_alone(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        class Pickled(torch.nn.Linear):
            def get_extra_state(self) -> torch.Tensor:
                return extra

        extra = torch.full((3 + hvd.rank(),), hvd.rank(), dtype=torch.uint8)
        net = torch.nn.Sequential(Pickled(2, 1))
        net.register_buffer("of_extra_state", torch.full((1,), float(hvd.rank())))
        for module in (net, net[0]):  # "0._extra_state" and "_extra_state"
            hvd.broadcast_parameters(module.state_dict(), root_rank=1)
        return [extra.tolist(), net.of_extra_state.item(), net[0].weight.tolist()]

    (first, first_buffer, first_weight), (second, second_buffer, second_weight) = two(fn)
    assert (first, second) == ([0] * 3, [1] * 4)
    assert (first_buffer, second_buffer) == (1.0, 1.0)
    assert first_weight == second_weight


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "ASGD", "Rprop"])
def test_optimizer_state_becomes_the_roots_and_no_weight_moves(two: Any, kind: str) -> None:
    def fn(hvd: Any) -> tuple[bool, Any, Any]:
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 2)
        options = {} if kind == "Rprop" else {"weight_decay": 0.01}
        options |= {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = getattr(torch.optim, kind)(net.parameters(), lr=0.1 * (hvd.rank() + 1), **options)
        if hvd.rank() == 0:  # only the root has any state
            net(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        before = net.weight.detach().clone()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        state = optimizer.state_dict()
        values = [
            (key, value.tolist() if torch.is_tensor(value) else value)
            for entry in state["state"].values()
            for key, value in sorted(entry.items())
        ]
        return torch.equal(before, net.weight), values, state["param_groups"]

    first, second = two(fn)
    assert first[0]
    assert second[0]
    assert first[1] == second[1]
    assert first[1]
    assert first[2] == second[2]


def test_tuples_among_the_options_stay_tuples(two: Any) -> None:
    def fn(hvd: Any) -> Any:
        optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], betas=(0.5 + 0.1 * hvd.rank(), 0.9))
        hvd.broadcast_optimizer_state(hvd.DistributedOptimizer(optimizer), root_rank=1)
        return optimizer.param_groups[0]["betas"]

    assert two(fn)[1] == (0.6, 0.9)


def test_lbfgs_is_refused(two: Any) -> None:
    def fn(hvd: Any) -> None:
        with pytest.raises(ValueError, match=r"cannot broadcast torch\.optim\.LBFGS state"):
            hvd.broadcast_optimizer_state(torch.optim.LBFGS([torch.nn.Parameter(torch.ones(1))]), root_rank=0)

    two(fn)


def test_state_that_the_root_cannot_send_is_refused_on_all_ranks(two: Any) -> None:
    def fn(hvd: Any) -> str:
        from torch.testing._internal.two_tensor import TwoTensor

        net = torch.nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        wrapped = TwoTensor(torch.ones(1, 2), torch.ones(1, 2))
        if hvd.rank() == 0:
            optimizer.state[net.weight]["momentum_buffer"] = wrapped
        with pytest.raises(ValueError, match="cannot broadcast the optimizer's state of rank 0: .*type TwoTensor"):
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        with pytest.raises(ValueError, match="invalid params: 'weight': .*type TwoTensor"):
            hvd.broadcast_parameters({"weight": wrapped}, root_rank=0)
        return hvd.broadcast_object(f"of {hvd.rank()}", root_rank=1)

    assert two(fn) == ["of 1", "of 1"]


def test_objects_travel_between_ranks(three: Any) -> None:
    def fn(hvd: Any) -> Any:
        mine = {"rank": hvd.rank(), "text": "x" * 1000 * hvd.rank()}
        sent = hvd.broadcast_object(mine if hvd.rank() == 2 else None, root_rank=2)
        everyone = hvd.allgather_object(mine, name="all")
        return sent["rank"], len(sent["text"]), [entry["rank"] for entry in everyone], sent is mine

    assert three(fn) == [(2, 2000, [0, 1, 2], rank == 2) for rank in range(3)]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "bfloat16", "bool"])
def test_objects_may_hold_tensors_of_any_dtype(three: Any, dtype: str) -> None:
    def fn(hvd: Any) -> list[bool]:
        values = torch.arange(6).reshape(2, 3) % (2 if dtype == "bool" else 7)
        mine = {"tensors": [part.to(getattr(torch, dtype)) for part in (values, values.t(), values[0, 1], values[:0])]}
        (*_, last) = hvd.allgather_object(mine)
        return [
            one.dtype == other.dtype and torch.equal(one.double(), other.double())
            for one, other in zip(last["tensors"], mine["tensors"], strict=True)
        ]

    assert three(fn) == [[True] * 4] * 3


def test_bytes_without_the_jobs_signature_are_never_unpickled(two: Any) -> None:
    def fn(hvd: Any) -> str:
        import cloudpickle

        from hvd_cluster.engine.objects import _from_bytes, _signed
        from hvd_cluster.errors import AuthenticationError

        pickled = cloudpickle.dumps([1])
        forged = _signed(pickled, "label")
        forged[-3] ^= 1
        with pytest.raises(AuthenticationError, match="does not carry the job's signature"):
            _from_bytes(forged, "label")
        with pytest.raises(AuthenticationError):
            _from_bytes(_signed(pickled, "one"), "another")
        return str(_from_bytes(_signed(pickled, "label"), "label"))

    assert two(fn) == ["[1]"] * 2


def test_state_of_every_form_arrives_as_it_is(two: Any) -> None:
    """What ``load_state_dict`` would cast to the parameter's type, and what other optimizers keep: lists, numbers."""

    def fn(hvd: Any) -> Any:
        weight = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
        tensor_lr = torch.tensor(0.1 * (hvd.rank() + 1))
        optimizer = torch.optim.Adam([weight], lr=tensor_lr, capturable=True)
        if hvd.rank() == 1:
            optimizer.state[weight] = {
                "step": torch.tensor(7.0),
                "master": torch.full((2, 2), 1.001, dtype=torch.float32),
                "nested": {"sums": [torch.tensor([1.5]), torch.tensor(2)], "seen": (3, "x")},
                "count": 5,
            }
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        state = optimizer.state[weight]
        assert torch.is_tensor(optimizer.param_groups[0]["lr"])
        return (
            float(optimizer.param_groups[0]["lr"]),
            state["step"].item(),
            state["master"].dtype,
            state["master"].tolist(),
            [part.tolist() for part in state["nested"]["sums"]],
            state["nested"]["seen"],
            state["count"],
            weight.tolist(),
        )

    first, second = two(fn)
    assert first == second
    assert first[2] == torch.float32
    assert first[-1] == [[1.0, 1.0]] * 2


def test_state_is_received_on_the_device_of_its_own_parameter() -> None:
    """On a worker with several GPUs, such as one whose model is split between two."""
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    state = {
        0: {"moment": At(0), "step": At(1)},
        1: {
            "moment": At(2),
            "step": At(3),
            "nested": {"sums": [At(4), (At(5), 0.5)]},
        },
        "shared": At(6),
    }
    kinds = ["cuda", "cpu", "cuda", "cpu", "cuda", "cuda", "cuda"]
    cpu = torch.device("cpu")
    assert _target_devices(state, kinds, [first, second]) == [first, cpu, second, cpu, second, second, first]
    assert _target_devices(state, kinds, [cpu, second]) == [second, cpu, second, cpu, second, second, second]
    assert _target_devices(state, kinds, [cpu, cpu]) == [cpu] * 7


def test_an_optimizer_without_state_gets_the_options(two: Any) -> None:
    def fn(hvd: Any) -> Any:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1 + hvd.rank())
        hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=torch.nn.Linear(1, 1))
        return optimizer.param_groups[0]["lr"]

    assert two(fn) == [0.1, 0.1]


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_rate_set_through_a_group_read_before_the_broadcast_counts_on_all_ranks(two: Any, is_wrapped: bool) -> None:
    def fn(hvd: Any) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(1))
        original = optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        (head,) = groups = optimizer.param_groups
        if is_wrapped:
            optimizer = hvd.DistributedOptimizer(optimizer)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        head["lr"] = 0.5
        groups.append({**head, "lr": 0.7})
        return [group["lr"] for one in (optimizer, original) for group in one.param_groups]

    assert two(fn) == [[0.5, 0.7] * 2] * 2


class Around(torch.optim.Optimizer):
    """An optimizer around another one, which computes its groups and its state from those of the other one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_rate_reaches_an_optimizer_within_another_one_after_a_broadcast(two: Any, is_wrapped: bool) -> None:
    def fn(hvd: Any) -> list[float]:
        inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
        original = optimizer = Around(inner)
        if is_wrapped:
            optimizer = hvd.DistributedOptimizer(optimizer)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.param_groups[0]["lr"] = 0.5
        return [one.param_groups[0]["lr"] for one in (original, inner)]

    assert two(fn) == [[0.5, 0.5]] * 2


def test_an_optimizer_without_state_leaves_gradients_of_zeros(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        net = torch.nn.Linear(2, 1)
        net.bias.requires_grad_(False)
        lazy = torch.nn.LazyLinear(1)
        optimizer = torch.optim.SGD([*net.parameters(), *lazy.parameters()], lr=0.1, weight_decay=0.1)
        before = net.weight.detach().clone()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        table = torch.nn.Embedding(2, 1, sparse=True)
        hvd.broadcast_optimizer_state(torch.optim.SparseAdam(table.parameters()), root_rank=0)
        assert torch.equal(net.weight, before)
        return [net.weight.grad.tolist(), net.bias.grad, table.weight.grad.is_sparse]

    assert two(fn) == [[[[0.0, 0.0]], None, True]] * 2


def test_parameters_of_unusual_types_are_broadcast(two: Any) -> None:
    def fn(hvd: Any) -> Any:
        tensors = {
            "complex": torch.full((2,), 1j * hvd.rank()),
            "unsigned": torch.full((3,), hvd.rank(), dtype=torch.uint16),
            "scalar": torch.tensor(hvd.rank(), dtype=torch.float8_e4m3fn),
            "text": "left alone",
        }
        hvd.broadcast_parameters(tensors, root_rank=1)
        return tensors["complex"].tolist(), tensors["unsigned"].tolist(), tensors["scalar"].float().item()

    assert two(fn) == [([1j, 1j], [1, 1, 1], 1.0)] * 2


@pytest.mark.slow
def test_process_sets_have_their_own_objects_and_parameters(four: Any) -> None:
    def fn(hvd: Any) -> Any:
        hvd.shutdown()
        sets = [hvd.ProcessSet([0, 2]), hvd.ProcessSet([1, 3])]
        hvd.init(process_sets=sets)
        mine = sets[hvd.rank() % 2]
        root = 2 + hvd.rank() % 2
        tensor = torch.tensor([float(hvd.rank())])
        hvd.broadcast_parameters([tensor], root_rank=root, process_set=mine)
        sent = hvd.broadcast_object(hvd.rank(), root_rank=root, process_set=mine)
        gathered = hvd.allgather_object(hvd.rank(), process_set=mine)
        hvd.barrier()  # the other set may not be done
        hvd.shutdown()
        hvd.init()
        return tensor.item(), sent, gathered

    assert four(fn) == [(2.0, 2, [0, 2]), (3.0, 3, [1, 3])] * 2


def test_lazy_conjugates_and_negatives_are_broadcast_by_value(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        one, two, three = (torch.full((2,), complex(hvd.rank(), 1 + hvd.rank())) for _ in range(3))
        state = {"conjugate": one.conj(), "negative": two.conj().imag, "on one": three.conj() if hvd.rank() else three}
        hvd.broadcast_parameters(state, root_rank=1)
        return [tensor.tolist()[0] for tensor in state.values()]

    assert two(fn) == [[1 - 2j, -2.0, 1 - 2j]] * 2


def test_expanded_buffers_are_broadcast(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        model = torch.nn.Module()
        model.register_buffer("scalar", torch.tensor(float(hvd.rank())).expand(2))
        model.register_buffer("rows", torch.tensor([[1.0], [2.0]]).mul(hvd.rank()).expand(2, 3))
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        return [model.scalar.tolist(), model.rows.tolist()]

    assert two(fn) == [[[1.0, 1.0], [[1.0] * 3, [2.0] * 3]]] * 2


@pytest.mark.needs("torch>=2.6")
def test_a_default_device_of_the_program_is_not_where_we_work(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        weight = torch.nn.Parameter(torch.zeros(2))
        table = torch.ones(hvd.rank() + 1, 2, requires_grad=True)
        model = torch.nn.Linear(1, 1)
        with torch.device("meta"):  # stands in for a GPU, as torch.set_default_device("cuda") makes it
            optimizer = hvd.DistributedOptimizer(torch.optim.Adam([weight], lr=1.0), [("w", weight)])
            (weight * (hvd.rank() + 1)).sum().backward()
            optimizer.step()
            hvd.broadcast_optimizer_state(optimizer, root_rank=1)
            hvd.allgather(table).sum().backward()
            hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=hvd.rank()).sync()
            hvd.broadcast_parameters(model.state_dict(), root_rank=1)
            objects = hvd.broadcast_object({"rank": hvd.rank()}, root_rank=1), hvd.allgather_object(hvd.rank())
            split, _ = hvd.alltoall(torch.arange(2, device="cpu") + 10 * hvd.rank(), splits=[1, 1])
        assert table.grad is not None
        return [*objects, weight.grad.tolist(), table.grad.tolist(), split.tolist()]

    rows = [[1.0, 1.0]]
    assert two(fn) == [
        [{"rank": 1}, [0, 1], [1.5, 1.5], rows, [0, 10]],
        [{"rank": 1}, [0, 1], [1.5, 1.5], rows * 2, [1, 11]],
    ]


def test_sparse_and_quantized_tensors_are_refused_with_the_remedy(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch: quantized tensors are deprecated
            quantized = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)
            for tensor in (torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr(), quantized):
                with pytest.raises(ValueError, match=r"'graph' is a .*load_state_dict\(hvd\.broadcast_object"):
                    hvd.broadcast_parameters({"a": torch.ones(2), "graph": tensor}, root_rank=1)
            model = torch.nn.Module()
            model.register_buffer("graph", torch.eye(2)[: 2 - hvd.rank()].sum(0, keepdim=True).to_sparse())
            model.load_state_dict(hvd.broadcast_object(model.state_dict(), 1))
        return model.graph.to_dense().tolist()

    assert two(fn) == [[[1.0, 0.0]]] * 2


def test_ranks_with_different_parameters_get_an_error_and_do_not_wait(two: Any) -> None:
    def fn(hvd: Any) -> str:
        model = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(1 + hvd.rank())))
        with pytest.raises(ValueError, match="different names") as caught:
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return str(caught.value)

    first, second = two(fn)
    assert first == second
    assert "1.weight are not on all ranks: make the same model" in first


def test_ranks_may_list_their_named_tensors_in_different_orders(two: Any) -> None:
    def fn(hvd: Any) -> list[float]:
        named = [(name, torch.full((1,), hvd.rank() + value)) for name, value in (("a", 1.0), ("b", 5.0))]
        hvd.broadcast_parameters(named[:: 1 - 2 * hvd.rank()], root_rank=1)
        return [tensor.item() for _, tensor in named]

    assert two(fn) == [[2.0, 6.0]] * 2


class Averaged(torch.optim.SGD):
    """An optimizer whose state dict has other keys, as that of Lookahead has."""

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        return {"fast_state": found["state"], "param_groups": found["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({"state": state_dict["fast_state"], "param_groups": state_dict["param_groups"]})


def test_a_state_dict_with_other_keys_is_broadcast(two: Any) -> None:
    def fn(hvd: Any) -> list[Any]:
        weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = Averaged([weight], lr=0.1 * (hvd.rank() + 1), momentum=0.9)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        weight.grad = torch.full((2,), hvd.rank() + 1.0)
        optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        return [optimizer.param_groups[0]["lr"], optimizer.state[weight]["momentum_buffer"].tolist()]

    assert two(fn) == [[0.1, [2.0, 2.0]]] * 2
