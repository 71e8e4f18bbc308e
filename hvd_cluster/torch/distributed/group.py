"""The process group of "hvd": torch's collectives as requests of the engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvd_cluster.engine import basics, current
from hvd_cluster.engine.signature import Kind, SetId, Signature, TensorMeta
from hvd_cluster.torch.distributed.arguments import c10d, listed, nested, only, options
from hvd_cluster.torch.distributed.calls import OrderedCalls
from hvd_cluster.torch.distributed.messages import Messages
from hvd_cluster.torch.distributed.named_group import NamedGroup
from hvd_cluster.torch.distributed.reductions import ScaledOp, reduction_of
from hvd_cluster.torch.distributed.sparse import sum_sparse
from hvd_cluster.torch.distributed.tensors import (
    ListTarget,
    Target,
    elements_by_rank,
    finishing,
    in_bytes,
    joined,
    metas,
    real,
    require_equal,
    source,
)
from hvd_cluster.torch.distributed.updates import ignore_updates
from hvd_cluster.torch.distributed.work import AllOf, HandleWork, end_completions

Tensors = list[torch.Tensor]

#: How long the end of the default group waits for the other ranks to come to theirs, if this one ends by an exception.
_MAX_END_WAIT = timedelta(seconds=30)


class HvdProcessGroup(NamedGroup):
    """The ranks of one group of torch.distributed, with torch's own methods.

    Every method returns at once, with the call in progress. Tensors may live on CPUs or on GPUs.

    Args:
        rank: this process's rank in the group.
        ranks: the global ranks of the group, by rank in the group.
        set_id: the engine's name for them.
        label: names the group in messages; equal on all ranks.
        timeout: how long the other ranks may take to make a call too; then the world ends, on all ranks.
        ends_world: this is the default group: its ``shutdown()`` ends a world that it has made.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        set_id: SetId,
        label: str,
        timeout: timedelta,
        *,
        ends_world: bool,
    ) -> None:
        super().__init__(rank, len(ranks))
        self._index = rank
        self._ranks = tuple(ranks)
        self.calls = OrderedCalls(set_id, label, timeout)
        self._messages = Messages(self._ranks, rank, label, timeout)
        self._ends_world = ends_world
        self._coalesced: list[HandleWork] | None = None

    # ---- reductions -------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        opts = options(opts, c10d.AllreduceOptions)
        tensors = listed(tensors)
        if any(tensor.is_sparse for tensor in tensors):
            dense = [tensor for tensor in tensors if not tensor.is_sparse]
            works: list[Any] = [self.allreduce(dense, opts)] if dense else []
            for tensor in tensors:
                if tensor.is_sparse:
                    summed = sum_sparse(self.calls, self.size(), tensor, opts.reduceOp, opts.timeout)
                    works.append(self._keep(summed))
            return AllOf(works) if len(works) > 1 else works[0]
        targets = [Target(tensor, is_read=True) for tensor in tensors]
        how = reduction_of(opts.reduceOp, tensors[0].dtype)
        flat = real([target.flat for target in targets])
        finish = finishing(targets)
        if not isinstance(how, ScaledOp):
            return self._fold(how, flat, flat, finish, tensors, opts)
        signature = Signature(Kind.ALLREDUCE, metas(flat), how.op)
        return self._submit(signature, how.scaled(flat), flat, tensors, opts, finish)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        opts = options(opts, c10d.ReduceOptions)
        tensors = listed(tensors)
        is_root = self._index == opts.rootRank
        how = reduction_of(opts.reduceOp, tensors[0].dtype)
        target = Target(tensors[0], is_read=True)
        (given,) = real([target.flat])
        # The results of the other ranks are not theirs to see.
        output = given if is_root else torch.empty_like(given)

        def finish(_: Tensors) -> None:
            if is_root:
                target.finish()

        if not isinstance(how, ScaledOp):
            return self._fold(how, [given], [output], finish, tensors, opts)
        signature = Signature(Kind.ALLREDUCE, metas([output]), how.op, self._ranks[opts.rootRank])
        return self._submit(signature, how.scaled([given]), [output], tensors, opts, finish)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        opts = options(opts, c10d.ReduceScatterOptions)
        for output, tensor in zip(outputs, inputs, strict=True):
            require_equal([tensor], output, "reduce_scatter", times=self.size())
        return self._reduce_scatter(outputs, [source(tensor) for tensor in inputs], opts)

    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = options(opts, c10d.ReduceScatterOptions)
        (output,), (parts,) = listed(outputs), nested(inputs)
        self._require_one_for_each(parts, "reduce_scatter")
        require_equal(parts, output, "reduce_scatter")
        return self._reduce_scatter([output], [joined(parts)], opts)

    def _reduce_scatter(self, outputs: Tensors, flat: Tensors, opts: Any) -> dist.Work:
        how = reduction_of(opts.reduceOp, flat[0].dtype)
        targets = [Target(output) for output in outputs]
        flat, places = real(flat), real([target.flat for target in targets])
        finish = finishing(targets)
        if isinstance(how, ScaledOp):
            signature = Signature(Kind.REDUCESCATTER, metas(flat), how.op)
            return self._submit(signature, how.scaled(flat), places, outputs, opts, finish)
        reduced = [torch.empty_like(tensor) for tensor in flat]

        def take_share(_: Tensors) -> None:
            for place, whole in zip(places, reduced, strict=True):
                place.copy_(whole.view(self.size(), -1)[self._index])
            finish(_)

        return self._fold(how, flat, reduced, take_share, outputs, opts)

    def _fold(
        self,
        combine: Callable[..., torch.Tensor],
        inputs: Tensors,
        outputs: Tensors,
        finish: Callable[[Tensors], None],
        results: Tensors,
        opts: Any,
    ) -> dist.Work:
        """Reduce by a function unknown to the engine: gather all operands, combine here."""
        gathered = [tensor.new_empty(self.size() * tensor.numel()) for tensor in inputs]

        def fold(_: Tensors) -> None:
            for output, operands in zip(outputs, gathered, strict=True):
                if output.numel():
                    first, *others = operands.view(self.size(), -1)
                    for other in others:
                        combine(first, other, out=first)
                    output.copy_(first)
            finish(outputs)

        sent = in_bytes([tensor.clone() for tensor in inputs])
        signature = Signature(Kind.ALLGATHER, metas(sent))
        return self._submit(signature, sent, in_bytes(gathered), results, opts, fold)

    # ---- moving tensors ---------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        opts = options(opts, c10d.BroadcastOptions)
        tensors = listed(tensors)
        targets = [Target(tensor, is_read=True) for tensor in tensors]
        flat = in_bytes([target.flat for target in targets])

        def finish(_: Tensors) -> None:
            if self._index != opts.rootRank:
                for target in targets:
                    target.finish()

        signature = Signature(Kind.BROADCAST, metas(flat), root=self._ranks[opts.rootRank])
        return self._submit(signature, flat, flat, tensors, opts, finish)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> dist.Work:
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    def allgather_into_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            require_equal([output], tensor, "all_gather", times=self.size())
        return self._allgather([Target(output) for output in outputs], inputs, outputs, opts)

    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        inputs, lists = listed(inputs), nested(outputs)
        for parts, tensor in zip(lists, inputs, strict=True):
            self._require_one_for_each(parts, "all_gather")
            require_equal(parts[self._index : self._index + 1], tensor, "all_gather")
        if any(len({part.numel() for part in parts}) > 1 for parts in lists):
            works: list[Any] = [self._allgather_unequal(*pair, opts) for pair in zip(lists, inputs, strict=True)]
            return works[0] if len(works) == 1 else AllOf(works)
        for parts, tensor in zip(lists, inputs, strict=True):
            require_equal(parts, tensor, "all_gather")
        results = [part for parts in lists for part in parts]
        return self._allgather([ListTarget(parts) for parts in lists], inputs, results, opts)

    def _allgather_unequal(self, parts: Tensors, tensor: torch.Tensor, opts: Any) -> dist.Work:
        """The ranks send tensors of different sizes, which all of them know."""
        require_equal([part.flatten()[:0] for part in parts], tensor.flatten()[:0], "all_gather")
        sent, expected = source(tensor).repeat(self.size()), [part.numel() for part in parts]
        sizes = [tensor.numel()] * self.size()
        return self._exchange(sent, parts, sizes, expected, options(opts, c10d.AllgatherOptions))

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        return self.allgather([list(parts) for parts in zip(*outputs, strict=True)], inputs, opts)

    def _allgather(
        self, targets: Sequence[Target | ListTarget], inputs: Tensors, results: Tensors, opts: Any
    ) -> dist.Work:
        sent = in_bytes([source(tensor) for tensor in inputs])
        places = in_bytes([target.flat for target in targets])
        signature = Signature(Kind.ALLGATHER, metas(sent))
        return self._submit(signature, sent, places, results, options(opts, c10d.AllgatherOptions), finishing(targets))

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = options(opts, c10d.GatherOptions)
        (tensor,) = listed(inputs)
        sent, is_root = source(tensor), self._index == opts.rootRank
        parts: Tensors = nested(outputs)[0] if is_root else []
        if is_root:
            self._require_one_for_each(parts, "gather")
            require_equal(parts, tensor, "gather")
        sizes = [sent.numel() if rank == opts.rootRank else 0 for rank in range(self.size())]
        expected = [part.numel() for part in parts]
        return self._exchange(sent, parts, sizes, expected, opts, opts.rootRank, sent.nbytes)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        opts = options(opts, c10d.ScatterOptions)
        (output,) = listed(outputs)
        parts: Tensors = nested(inputs)[0] if self._index == opts.rootRank else []
        if parts:
            self._require_one_for_each(parts, "scatter")
            require_equal(parts, output, "scatter")
        sent = joined(parts) if parts else output.new_empty(0)
        sizes = [output.numel() if rank == opts.rootRank else 0 for rank in range(self.size())]
        sent_sizes = [part.numel() for part in parts]
        return self._exchange(sent, [output], sent_sizes, sizes, opts, opts.rootRank, output.nbytes)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        self._require_one_for_each(inputs, "all_to_all")
        self._require_one_for_each(outputs, "all_to_all")
        sizes, expected = [part.numel() for part in inputs], [part.numel() for part in outputs]
        return self._exchange(joined(inputs), outputs, sizes, expected, options(opts, c10d.AllToAllOptions))

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> dist.Work:
        sizes, expected = (
            elements_by_rank(tensor, rows, self.size())
            for tensor, rows in ((input, input_split_sizes), (output, output_split_sizes))
        )
        if input.dtype != output.dtype:
            raise ValueError(f"all_to_all: Invalid tensor type: {output.dtype} receives {input.dtype}")
        return self._exchange(source(input), [output], sizes, expected, options(opts, c10d.AllToAllOptions))

    all_to_all_single = alltoall_base

    def _exchange(
        self,
        sent: torch.Tensor,
        outputs: Tensors,
        sizes: list[int],
        expected: list[int],
        opts: Any,
        root: int = -1,
        part_bytes: int = -1,
    ) -> dist.Work:
        """Send ``sizes[i]`` elements of ``sent`` to group rank i, get ``expected[i]``.

        Args:
            sent: flat.
            outputs: get what arrives, one after the other.
            sizes: sum up to the elements of ``sent``; empty for none.
            expected: sum up to the elements of ``outputs``; empty for none.
            opts: torch's.
            root: the group rank that gathers or scatters.
            part_bytes: what it exchanges with each rank, which must be equal on all; -1 if ranks may differ.
        """
        target = Target(outputs[0]) if len(outputs) == 1 else ListTarget(outputs) if outputs else Target(sent[:0])
        itemsize, none = sent.element_size(), [0] * self.size()
        meta = TensorMeta("uint8", (part_bytes,), sent.device.type)
        signature = Signature(Kind.ALLTOALL, (meta,), root=-1 if root < 0 else self._ranks[root])
        return self._submit(
            signature,
            in_bytes([sent]),
            in_bytes([target.flat]),
            outputs,
            opts,
            lambda _: target.finish(),
            tuple(count * itemsize for count in sizes or none),
            tuple(count * itemsize for count in expected or none),
        )

    # ---- without tensors, and between two ranks ---------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._submit(Signature(Kind.BARRIER), [], [], [], options(opts, c10d.BarrierOptions), lambda _: None)

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> dist.Work:
        return self._keep(self._messages.send(only(tensors), dst, tag))

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> dist.Work:
        return self._keep(self._messages.receive(only(tensors), src, tag))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        return self._keep(self._messages.receive_from_any(only(tensors), tag))

    # ---- the group itself -------------------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return AllOf(works)

    def set_timeout(self, timeout: timedelta) -> None:
        self.calls.timeout_s = self._messages.timeout_s = timeout.total_seconds()

    def abort(self) -> None:
        """End the world: every call in progress fails, on all ranks."""
        if current.is_initialized():
            current.engine().abort(f"rank {current.rank()} has aborted a process group of torch.distributed")
            if self._ends_world:
                ignore_updates()
                basics.give_back()

    def shutdown(self) -> None:
        """Release the group; the default one ends the world it made, when all ranks come."""
        self._messages.close()
        if self._ends_world:
            ignore_updates()
            try:
                basics.give_back(self._await_others)
            finally:
                end_completions()

    def _await_others(self) -> None:
        # In a ``finally`` or ``except``: the others may wait in a call that this rank does not make any more.
        self.barrier().wait(timedelta(0) if sys.exc_info()[0] is None else _MAX_END_WAIT)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _submit(
        self,
        signature: Signature,
        inputs: Tensors,
        outputs: Tensors,
        results: Tensors,
        opts: Any,
        finish: Callable[[Tensors], None],
        splits: tuple[int, ...] = (),
        output_splits: tuple[int, ...] = (),
    ) -> dist.Work:
        call = self.calls.submit(
            signature,
            inputs,
            outputs,
            splits=splits,
            output_splits=output_splits,
            finish=finish,
            timeout=opts.timeout,
            is_waited_for=not getattr(opts, "asyncOp", True),
        )
        return self._keep(HandleWork(call.handle, results, call=call))

    def _keep(self, work: HandleWork) -> HandleWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _require_one_for_each(self, tensors: Tensors, what: str) -> None:
        if len(tensors) != self.size():
            raise ValueError(f"{what}: Incorrect number of tensors: expected {self.size()}, one for each rank")
