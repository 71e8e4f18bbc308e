"""What is said of ranks of this host for which a collective has waited too long."""

from __future__ import annotations

from collections.abc import Sequence


def too_late(ranks: Sequence[int], limit_s: float, did_not: str = "come to a collective") -> RuntimeError:
    """The error that ends the wait.

    Args:
        ranks: who was waited for, as far as that is known.
        limit_s: seconds that it took.
        did_not: what they should have done.
    """
    listed = ", ".join(map(str, ranks))
    who, are = (f"rank {listed}", "it is") if len(ranks) == 1 else (f"ranks {listed}", "they are")
    if not ranks:
        who, are = "the other ranks", "one of them is"
    return RuntimeError(
        f"{who} of this host did not {did_not} within {limit_s:g} s: {are} stopped or overloaded. "
        "HOROVOD_GLOO_TIMEOUT_SECONDS sets how long to wait"
    )
