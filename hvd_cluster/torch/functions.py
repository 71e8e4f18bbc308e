"""Broadcast of parameters, optimizer state and objects, and allgather of objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map_only

from hvd_cluster.engine import objects
from hvd_cluster.engine.membership import running_engine
from hvd_cluster.engine.none_arguments import none_is_default
from hvd_cluster.engine.process_sets import ProcessSet, global_process_set
from hvd_cluster.engine.request import REDUCED_DTYPES, describe
from hvd_cluster.engine.signature import element_dtype
from hvd_cluster.engine.submission import wait_all
from hvd_cluster.torch import wire
from hvd_cluster.torch.collectives.allgather import allgather
from hvd_cluster.torch.collectives.broadcast import submit_broadcast
from hvd_cluster.torch.gradient_layout import fingerprint
from hvd_cluster.torch.submission import checked, require_memory
from hvd_cluster.torch.wrapper import load_unchanged

#: The last part of a state dict's key for what ``Module.get_extra_state`` returns.
_EXTRA_STATE = "_extra_state"


@none_is_default
def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite tensors with those of ``root_rank``, in place.

    Args:
        params: a state dict, or a list of tensors or of (name, tensor) pairs, with equal names on all ranks. Entries of
            a state dict that are not tensors are ignored, and so are the tensors that modules have as extra state, if
            their shapes or dtypes differ between ranks: broadcast these with :func:`broadcast_object`, and pass them to
            ``set_extra_state`` of the modules.
        root_rank: the global rank whose tensors are broadcast.
        process_set: the ranks that take part.

    Raises:
        ValueError: ``params`` is something else, e.g. a generator, its tensors are inside of its entries, one is
            sparse, quantized or without memory of its own (a DTensor), or the ranks have tensors of different names.
    """
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, list):
        named = [entry if isinstance(entry, tuple) else (f"{i}", entry) for i, entry in enumerate(params)]
    else:
        raise ValueError(f"invalid params of type: {type(params)}; pass model.state_dict(), or a list of tensors")
    tensors = [(name, entry) for name, entry in named if isinstance(entry, torch.Tensor)]
    extra = [(name, tensor) for name, tensor in tensors if _is_extra(name)]
    _require_flat([(name, entry) for name, entry in named if not _is_extra(name)])
    tensors = [(name, tensor) for name, tensor in tensors if not _is_extra(name)]
    specs = [f"{name} {tensor.dtype} {tensor.shape} {tensor.layout}" for name, tensor in extra]
    if _require_equal_names([str(name) for name, _ in tensors], specs, process_set):
        tensors += extra
    _require_plain(tensors)
    written = [_elements_once(tensor.data) for _, tensor in tensors]
    # A tensor is sent as a copy if it is not contiguous, or if torch has not computed its conjugation or negation yet.
    copies = [(tensor, tensor.contiguous().resolve_conj().resolve_neg()) for tensor in written]
    handles = [
        submit_broadcast(_as_sendable(copy), root_rank, f"parameters.{name}", process_set, in_place=True)
        for (name, _), (_, copy) in zip(tensors, copies, strict=True)
    ]
    wait_all(handles)
    for tensor, copy in copies:
        if tensor.data_ptr() != copy.data_ptr():
            tensor.copy_(copy)


def _is_extra(name: Any) -> bool:
    return str(name).rpartition(".")[-1] == _EXTRA_STATE


def _elements_once(tensor: torch.Tensor) -> torch.Tensor:
    """A view to write each element once: ``expand()`` repeats those of a dimension."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _require_flat(named: Sequence[tuple[Any, Any]]) -> None:
    """Check that no tensor is inside of an entry: the broadcast would not find it."""
    for name, entry in named:
        if isinstance(entry, (Mapping, list)) and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(entry)):
            raise ValueError(
                f"invalid params: the entry {name!r} is a {type(entry).__name__} that contains tensors; broadcast it "
                "by itself, e.g. model.state_dict(), or all of it with broadcast_object"
            )
    if named and not any(isinstance(entry, torch.Tensor) for _, entry in named):
        kinds = ", ".join(sorted({type(entry).__name__ for _, entry in named}))
        raise ValueError(f"invalid params: no entry is a tensor, but {kinds}; pass model.state_dict()")


def _require_plain(named: Sequence[tuple[Any, torch.Tensor]]) -> None:
    """Check that the tensors can be overwritten in place, through a state dict.

    Sparse and quantized ones cannot.
    """
    for name, tensor in named:
        if tensor.layout != torch.strided or tensor.is_quantized:
            kind = "quantized" if tensor.is_quantized else str(tensor.layout)
            raise ValueError(
                f"invalid params: {name!r} is a {kind} tensor, which cannot be overwritten in place; call "
                "model.load_state_dict(hvd.broadcast_object(model.state_dict(), root_rank)), or register such a buffer "
                "with persistent=False if it is equal on all ranks"
            )
        try:
            require_memory(tensor)
        except ValueError as error:
            raise ValueError(f"invalid params: {name!r}: {error}") from None


def _require_equal_names(names: list[str], specs: list[str], process_set: ProcessSet) -> bool:
    """Check that all ranks have the same tensors; else some would wait forever.

    Returns:
        Whether ``specs`` are equal on all ranks too.
    """
    own = torch.tensor([[fingerprint(sorted(names)), fingerprint(specs)]], device="cpu")
    found = allgather(own, "parameters.names", process_set)
    if len(found[:, 0].unique()) == 1:
        return len(found[:, 1].unique()) == 1
    names_by_rank = allgather_object(names, process_set=process_set)
    everywhere = set(names_by_rank[0]).intersection(*names_by_rank[1:])
    differing = sorted(set().union(*names_by_rank) - everywhere)
    raise ValueError(
        f"the ranks broadcast tensors of different names: {', '.join(differing[:5])}"
        f"{' and others' if len(differing) > 5 else ''} are not on all ranks: make the same model on all ranks"
    )


@none_is_default
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Broadcast the state and the options of ``root_rank``'s optimizer to all ranks.

    The structure of the state is sent first, so no step is needed to create it and no weight changes. As in Horovod,
    which takes such a step, trainable parameters of an optimizer without state get gradients of zeros instead of None.

    Args:
        optimizer: an optimizer of the same kind over the same parameters on all ranks.
        root_rank: the global rank whose state is broadcast.
        model: accepted for compatibility; Horovod uses it to find sparse embeddings.
        process_set: the ranks that take part.

    Raises:
        ValueError: LBFGS, whose state differs in shape between ranks; or a tensor of the root's state cannot be sent,
            e.g. a DTensor.
    """
    del model
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    is_root = running_engine().world.topology.rank == root_rank
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not optimizer.state_dict().get("state", True):  # an optimizer around another one may name it differently
        sparse_dim = 1 if isinstance(optimizer, torch.optim.SparseAdam) else 0
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None and not is_lazy(parameter):
                parameter.grad = wire.empty(parameter, sparse_dim)
    tensors: list[torch.Tensor] = []

    def take(tensor: torch.Tensor) -> _TensorIndex:
        tensors.append(tensor)
        return _TensorIndex(len(tensors) - 1)

    skeleton = tree_map_only(torch.Tensor, take, optimizer.state_dict()) if is_root else None
    refusal = _refusal(tensors)
    metas = [] if refusal else [describe(tensor) for tensor in tensors]
    skeleton, metas, refusal = broadcast_object((skeleton, metas, refusal), root_rank, process_set=process_set)
    if refusal:
        raise ValueError(f"cannot broadcast the optimizer's state of rank {root_rank}: {refusal}")
    if not is_root:
        targets = _target_devices(
            skeleton.get("state", {}), [meta.device for meta in metas], [p.device for p in parameters]
        )
        tensors = [
            torch.empty(meta.shape, dtype=element_dtype(meta.dtype), device=target)
            for meta, target in zip(metas, targets, strict=True)
        ]
    sent = [tensor.contiguous() for tensor in tensors]
    handles = [
        submit_broadcast(_as_sendable(tensor), root_rank, f"optimizer_state.{i}", process_set, in_place=True)
        for i, tensor in enumerate(sent)
    ]
    wait_all(handles)
    if not is_root:
        state_dict = tree_map_only(_TensorIndex, lambda leaf: sent[leaf.index], skeleton)
        load_unchanged(optimizer, state_dict)


def _refusal(tensors: Iterable[torch.Tensor]) -> str:
    """Why one of the tensors cannot be sent, or nothing.

    Every rank must raise, because the others would wait.
    """
    try:
        for tensor in tensors:
            checked([tensor if tensor.layout != torch.strided else _as_sendable(tensor.detach().contiguous())])
    except ValueError as error:
        return str(error)
    return ""


def share_buffers(model: torch.nn.Module, root_rank: int) -> None:
    """Overwrite a model's saved buffers, e.g. running means, with ``root_rank``'s."""
    names = {name for name, _ in model.named_buffers()}
    buffers = {name: value for name, value in model.state_dict().items() if name in names}
    if buffers:
        broadcast_parameters(buffers, root_rank)


@none_is_default
def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Broadcast ``root_rank``'s object to all ranks.

    Args:
        obj: any object that cloudpickle supports; other ranks' objects are ignored.
        root_rank: the global rank whose object is broadcast.
        name: matches the call with those of the other ranks.
        process_set: the ranks that take part.

    Returns:
        ``obj`` itself on the root, a copy elsewhere.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


@none_is_default
def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Gather the objects of all ranks on every rank, in the order of the ranks.

    Args:
        obj: any object that cloudpickle supports.
        name: matches the call with those of the other ranks.
        process_set: the ranks that take part.
    """
    return objects.allgather_object(obj, name, process_set)


@dataclass(frozen=True)
class _TensorIndex:
    """Replaces a tensor in a state dict."""

    index: int


def _target_devices(state: dict[Any, Any], kinds: Sequence[str], devices: Sequence[torch.device]) -> list[torch.device]:
    """Each state tensor's device here: its parameter's if the root has that kind.

    Args:
        state: the state without tensors, by the number of the parameter.
        kinds: the kind of device that each tensor has on the root: "cpu", "cuda".
        devices: the devices of the parameters.
    """
    own = {
        leaf.index: devices[number]
        for number, entry in state.items()
        if isinstance(number, int) and number < len(devices)
        for leaf in tree_leaves(entry)
        if isinstance(leaf, _TensorIndex)
    }
    targets = []
    for index, kind in enumerate(kinds):
        candidates = [own[index], *devices] if index in own else devices
        targets.append(next((device for device in candidates if device.type == kind), torch.device("cpu")))
    return targets


def _as_sendable(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor over the same memory, as a dtype that collectives support.

    A broadcast only moves bytes.
    """
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    if tensor.dtype in REDUCED_DTYPES:
        return tensor
    return tensor.view(-1).view(torch.uint8)
