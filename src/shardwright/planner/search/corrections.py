"""Corrections of a search's memory: its closed forms predicted less than the account of a plan that they admitted.

The arrays (memory/rank_estimate.py) have closed forms for the memory of a schedule, and the account replays the
schedule. If the account is larger, plans of the same schedule, ZeRO stage and recomputation count as larger by the same
factor, and the search goes on (search.py). That is rare, and a few times are enough.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shardwright.config.job import JobSpec
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.software import software_of
from shardwright.cost.calibration import Constants
from shardwright.cost.from_job import run_of
from shardwright.memory.job_memories import fullest
from shardwright.memory.rank_estimate import Memory, peak_memory
from shardwright.planner.search.adjacent_plans import variant_of_plan
from shardwright.planner.search.plan_block import PlanBlock

_MARGIN = 1.001  # so that rounding does not admit a refuted plan again

# The schedule, the ZeRO stage, and the fields of recomputation.
_Alike = tuple[str, int, str, tuple[str, ...], int, bool]


class Corrections:
    """Factors of the memory of plans without their state, account over closed forms, by schedule, ZeRO and
    recomputation."""

    def __init__(self) -> None:
        self._factors: dict[_Alike, float] = {}

    @property
    def is_empty(self) -> bool:
        """True until something is learned."""
        return not self._factors

    def learned(self, job: JobSpec, refuted: Sequence[JobSpec], constants: Constants) -> bool:
        """Learn from plans that do not fit by the account; False if there is nothing to learn."""
        if not software_of(job.cluster.software).is_own:
            return False
        for plan in refuted:
            exact, quick = fullest(plan, constants), peak_memory(run_of(plan), constants)
            key = _alike(plan)
            factor = _MARGIN * max(
                1.0, float(exact.total - _state(quick)) / max(1.0, float(quick.total - _state(quick)))
            )
            self._factors[key] = max(factor, self._factors.get(key, 1.0))
        return bool(refuted)

    def applied(self, block: PlanBlock, memory: Memory) -> Memory:
        """The memory of a block's plans with the learned corrections."""
        factors = np.ones(len(block))
        for (schedule, zero, *key_policy), factor in self._factors.items():
            if tuple(key_policy) == block.variant.recomputation:
                is_alike = (block.schedule == SCHEDULES.names.index(schedule)) & (block.columns["zero"] == zero)
                factors = np.where(is_alike, factor, factors)
        if np.all(factors == 1.0):
            return memory
        return replace(
            memory,
            activations=memory.activations * factors,
            buffers=memory.buffers * factors,
            working=memory.working * factors,
        )


def _alike(job: JobSpec) -> _Alike:
    return job.plan.schedule, job.plan.zero, *variant_of_plan(job).recomputation


def _state(memory: Memory) -> float:
    return float(memory.parameters + memory.gradients + memory.optimizer)
