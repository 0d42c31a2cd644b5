"""The ranks of a layer's experts, and the number of tokens that travel to them if a gate chooses evenly."""

import math
from dataclasses import dataclass

from shardwright.config.cluster_facts import node_devices
from shardwright.config.job import JobSpec
from shardwright.memory.moe_activations import expected_rows


@dataclass(frozen=True)
class ExpertPlacement:
    """The experts of one layer, for one microbatch. `homes` are (first expert, last expert, rank, node) for each rank
    of rank 0's ep group.

    `num_rows` leave a rank, one for each choice of its tokens; `num_stay` of them have their expert on the same rank.
    `nodes_of_token` is the average number of nodes of a token's experts; 0 if nodes are unknown.
    """

    num_experts: int
    num_chosen: int
    num_tokens: int
    num_rows: int
    num_stay: float
    rows_of_expert: float
    nodes_of_token: float
    homes: tuple[tuple[int, int, int, int], ...]


def expert_placement(job: JobSpec, ranks: tuple[int, ...], nodes: tuple[int, ...]) -> ExpertPlacement | None:
    """The placement on `ranks` and `nodes`, which are those of rank 0's ep group; None for a model without experts."""
    moe, plan = job.model.moe, job.plan
    if not moe.experts:
        return None
    rows, num_held = expected_rows(job), moe.experts // plan.ep
    homes = tuple(
        (num_held * index, num_held * (index + 1) - 1, rank, node)
        for index, (rank, node) in enumerate(zip(ranks, nodes, strict=True))
    )
    per_node = max(map(nodes.count, nodes))
    is_known = node_devices(job.cluster) and plan.ep > 1 and plan.ep % per_node == 0
    of_token = expected_nodes(moe.experts, plan.ep // per_node, moe.num_chosen) if is_known else 0.0
    return ExpertPlacement(
        num_experts=moe.experts,
        num_chosen=moe.num_chosen,
        num_tokens=rows.sent // moe.num_chosen,
        num_rows=rows.sent,
        num_stay=rows.sent / plan.ep,
        rows_of_expert=rows.arrived / num_held,
        nodes_of_token=of_token,
        homes=homes,
    )


def expected_nodes(num_experts: int, num_nodes: int, top_k: int) -> float:
    """The average number of nodes that a token needs, if its k distinct choices are uniform.

    Each node holds an n-th of the E experts, and none of the k is on it with probability C(E - E/n, k) / C(E, k).
    """
    elsewhere = num_experts - num_experts // num_nodes
    return num_nodes * (1.0 - math.comb(elsewhere, top_k) / math.comb(num_experts, top_k))
