"""The memory of a layer under a policy of recomputation, in the moments of a microbatch that count."""

from dataclasses import dataclass

from shardwright.account.activations import Layer
from shardwright.account.kept_tensors import Bytes
from shardwright.config.recompute_policy import Policy


@dataclass(frozen=True)
class LayerMemory:
    """Bytes that a microbatch holds in a layer: from F to B; besides, in its turn of the backward; from I to W; and
    what operators need in that turn, where that counts."""

    policy: Policy
    kept_bytes: Bytes
    again_bytes: Bytes
    deferred_bytes: Bytes
    working_bytes: Bytes = 0

    @classmethod
    def of(cls, layer: Layer, policy: Policy, is_away: bool = False, works: bool = False) -> "LayerMemory":
        """The memory of a layer with a policy. What it keeps is away in host memory, or there: its own in its turn of
        the backward, and that of the layer whose turn is next. What operators need is counted where it `works`."""
        kept, again = layer.kept_bytes(policy), layer.again_bytes(policy) + (2 * layer.kept_bytes(policy) * is_away)
        working = layer.working_bytes(policy) if works else 0
        return cls(policy, 0 if is_away else kept, again, layer.deferred_bytes(), working_bytes=working)
