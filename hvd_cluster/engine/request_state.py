"""What a node of the tree knows about a request that is not decided yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from hvd_cluster.engine.messages import RankSignature


@dataclass
class RequestState:
    """What a node knows about a request that is not decided yet."""

    signatures: list[RankSignature] = field(default_factory=list)
    children: set[int] = field(default_factory=set)
    mine: bool = False
    joined: bool = False
    sent: bool = False

    def add(self, signature: RankSignature) -> None:
        """Keep one signature, and a second one if it differs from the first."""
        if len(self.signatures) < 2 and all(signature.signature != other.signature for other in self.signatures):
            self.signatures.append(signature)
