"""The texts of errors about gradients."""

from __future__ import annotations

CHANGED_IN_SPLIT_STEP = (
    "was changed or replaced, but another rank has done fewer backward passes and had to call step() for it"
)
PASS_THEIR_NUMBER = (
    "If step() follows several backward passes, pass their number as backward_passes_per_step to DistributedOptimizer "
    "(now {passes}), and let the first step have all of them."
)
SUM_ONCE = "Clear it with optimizer.zero_grad(), or pass the number of passes as backward_passes_per_step."
SYNCHRONIZE_FIRST = (
    "Change gradients between backward() and step(). Where a hook does so, or step() follows a backward pass that did "
    "not complete all gradients, call optimizer.synchronize() first, and step() inside `with "
    "optimizer.skip_synchronize():`."
)
#: Horovod's text, but for the advice on checkpoints.
TOO_MANY_PASSES = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step (now {passes}) to accumulate gradients locally. If this was one backward pass, {name!r} "
    "is used in several re-entrant checkpoints: pass use_reentrant=False to them."
)
TWO_THREADS = (
    "Two DistributedOptimizers are trained at the same time in two threads. Make each in the thread that trains it, "
    "not in the one that has called hvd.init(), and pass named_parameters with different names."
)
TWO_OPTIMIZERS = (
    "{name!r} is a parameter of two DistributedOptimizers, and both would reduce its gradient. Pass it to one of them, "
    "or delete the one that is no longer used."
)
