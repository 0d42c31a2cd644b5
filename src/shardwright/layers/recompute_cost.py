"""The recomputation of our runtime under a policy, and its cost: a layer's operators at a roofline's ratios.

The predictions count the same operators (chains.py), except for a whole layer: its last product gives the input of the
residual sum, and a sum keeps nothing, so our runtime never recomputes that product (parallel/recompute/region.py).
"""

from dataclasses import dataclass

from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.recompute_policy import Policy
from shardwright.config.software import software_of
from shardwright.layers.chains import Chain, chains, share_run_again
from shardwright.layers.operators import Operator
from shardwright.layers.query import grid_of, policy_name

# The cost of a byte in FLOPs, if it is read or written on the device, and if it is sent in a collective. From an H100:
# 989e12 FLOP/s over 3.35e12 bytes/s of memory, and over 4.5e11 of NVLink.
_FLOPS_OF_MOVED_BYTE, _FLOPS_OF_SENT_BYTE = 300.0, 2000.0


def operators_again(chain: Chain, policy: str) -> list[tuple[Operator, float]]:
    """The operators of a layer that our runtime recomputes under a policy, by the policy's name in a PlanGrid, and the
    share of each that is recomputed."""
    names = [operator.name for operator in chain]
    # A layer that ends with a norm of its MLP's result is recomputed to its end.
    ends_with_product = "down" in names and "mlp out norm" not in names
    end = names.index("down") if policy == "full" and ends_with_product else len(names)
    shares = [(operator, share_run_again(operator, policy)) for operator in chain[:end]]
    return [(operator, share) for operator, share in shares if share]


@dataclass(frozen=True)
class Again:
    """The operators of a layer, for one microbatch on one rank."""

    chain: Chain
    element_bytes: int

    @classmethod
    def of(cls, job: JobSpec, layer: int = 0) -> "Again":
        """The costs of a layer of a job, by its number in the model, with kernels of the cluster's software."""
        without_recompute = job.model_copy(update={"plan": job.plan.model_copy(update={"recompute": "none"})})
        shape, grid = shape_of(without_recompute.model), grid_of(without_recompute)
        chain = chains(shape, grid, software_of(job.cluster.software))[shape.kind(layer)]
        return cls(chain, grid.element_bytes)

    def operators(self, policy: Policy) -> list[tuple[Operator, float]]:
        """The recomputed operators, and the share of each that is recomputed."""
        return operators_again(self.chain, policy_name(policy))

    def flops(self, policy: Policy) -> float:
        """FLOPs that are recomputed."""
        return float(sum(share * operator.flops for operator, share in self.operators(policy)))

    def cost(self, policy: Policy) -> float:
        """The time of the recomputation, in FLOPs of the device."""
        return sum(share * self._price(operator) for operator, share in self.operators(policy))

    def _price(self, operator: Operator) -> float:
        """The time of an operator's forward in FLOPs: compute and memory traffic overlap, and collectives add up."""
        moved_bytes = operator.forward_bytes + self.element_bytes * sum(p.elements for p in operator.products)
        sent_bytes = sum(exchange.size for exchange in operator.forward)
        return float(max(operator.flops, _FLOPS_OF_MOVED_BYTE * moved_bytes) + _FLOPS_OF_SENT_BYTE * sent_bytes)
