"""Group-limited choice: a token's experts lie in a few groups, such as nodes, so that it visits few of them.

DeepSeek-V2 (arXiv 2405.04434, section 2.2.2) compares groups by their best expert, DeepSeek-V3 (arXiv 2412.19437,
section 2.1.2) by the sum of their best two.

Shape suffixes: T tokens, E experts, G groups, e = E / G experts of a group.
"""

import math

from torch import Tensor

from shardwright.config.moe import MoeSpec
from shardwright.model.gates.choice import largest


def within_groups(preference_TE: Tensor, spec: MoeSpec) -> Tensor:
    """The preference, -inf outside of each token's best groups."""
    if spec.num_groups == 1:
        return preference_TE
    by_group_TGe = preference_TE.unflatten(-1, (spec.num_groups, -1))
    if spec.group_score == "max":
        group_TG = by_group_TGe.amax(dim=-1)
    else:
        group_TG = by_group_TGe.topk(2, dim=-1).values.sum(dim=-1)
    outside_TG = group_TG.new_ones(group_TG.shape, dtype=bool)
    outside_TG.scatter_(-1, largest(group_TG, spec.groups_kept), False)
    return by_group_TGe.masked_fill(outside_TG[..., None], -math.inf).flatten(-2)
