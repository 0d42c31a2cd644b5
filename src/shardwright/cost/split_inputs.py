"""Inputs that layers keep to be computed again, of which each tp rank keeps a share (ZeRO's P_a; Megatron-LM's
--distribute-checkpointed-activations).

A layer's input is the same on all tp ranks without sequence parallel. The ranks gather it from their shares before they
compute the layer again, and wait for it (Rajbhandari et al. 2020, arXiv 1910.02054, section 6.1: one gather more for
each layer).
"""

import numpy as np

from shardwright.config.software import SoftwareSpec
from shardwright.cost.calibration import Rates
from shardwright.cost.collective_time import ring_s
from shardwright.cost.topology import Group
from shardwright.layers.arrays import Numbers
from shardwright.layers.query import Run


def input_gather_s(run: Run, software: SoftwareSpec, rates: Rates, tp: Group, kept: Numbers) -> Numbers:
    """Seconds to gather a layer's input of `kept` bytes, if `software` splits it over the tp ranks."""
    if not software.splits_inputs:
        return 0.0
    return ring_s(rates, tp, kept * (1 - np.asarray(run.grid.sequence_parallel)))
