"""A lower bound on the seconds of a pipeline in any order of work. A plan that it excludes need not be simulated."""

import numpy as np

from shardwright.schedule.timing import Costs
from shardwright.sharding.stage_placement import StagePlacement


def least_pipeline_s(
    costs: Costs, placement: StagePlacement, num_microbatches: int, splits_weights: bool
) -> tuple[float, float]:
    """(Computation of the rank that computes longest, a lower bound on a step with messages), in seconds.

    Proof: a rank computes one action at a time. It begins when a microbatch has passed all stages before the first of
    its own, and every message on its way. If backwards are whole, its last action is one, and the gradient has still to
    pass the stages before it. So a step takes at least the work of any rank, and the least of each of these two ways.
    """
    forward, backward = np.array(costs.forward), np.add(costs.input_grad, costs.weight_grad)
    transfer_s = np.array(costs.transfer or (0.0,) * (len(forward) - 1)) + costs.latency
    busy_s = np.zeros(placement.num_ranks)
    before_s, after_s = np.full_like(busy_s, np.inf), np.full_like(busy_s, 0.0 if splits_weights else np.inf)
    for holders in map(np.array, placement.holders):
        message_s = transfer_s * (np.diff(holders) != 0)
        np.add.at(busy_s, holders, num_microbatches // placement.num_copies * (forward + backward))
        for least_s, passed_s in ((before_s, forward), (after_s, backward)):
            np.minimum.at(least_s, holders, np.append(0.0, np.cumsum(passed_s[:-1] + message_s)))
    return float(busy_s.max()), float((before_s + busy_s + after_s).max())
