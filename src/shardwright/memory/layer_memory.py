"""The memory of a layer under a policy of recomputation, at the moments of a microbatch that may be the peak."""

from dataclasses import dataclass

from shardwright.config.recompute_policy import Policy
from shardwright.memory.activations import Layer
from shardwright.memory.kept_tensors import Bytes


@dataclass(frozen=True)
class LayerMemory:
    """Bytes that a microbatch holds in a layer: `kept_bytes` from F to B; `again_bytes` more in the layer's turn of the
    backward; `deferred_bytes` from I to W; and `working_bytes` of the operators in that turn, 0 if not counted."""

    policy: Policy
    kept_bytes: Bytes
    again_bytes: Bytes
    deferred_bytes: Bytes
    working_bytes: Bytes = 0

    @classmethod
    def of(cls, layer: Layer, policy: Policy, is_away: bool = False, works: bool = False) -> "LayerMemory":
        """The memory of a layer with a policy. If `is_away`, its kept tensors are in host memory; on the device are, in
        its turn of the backward, its own and those of the layer whose turn is next. `works`: count working memory."""
        kept, recomputed = (
            layer.kept_bytes(policy),
            layer.again_bytes(policy) + (2 * layer.kept_bytes(policy) * is_away),
        )
        working = layer.working_bytes(policy) if works else 0
        return cls(policy, 0 if is_away else kept, recomputed, layer.deferred_bytes(), working_bytes=working)
