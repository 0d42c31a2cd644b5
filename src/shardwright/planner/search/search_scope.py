"""The input of one search: the space of plans, and the limits of the result."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from shardwright.config.job import JobSpec
from shardwright.cost.calibration import Constants
from shardwright.layers.memo import Memo
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.corrections import Corrections
from shardwright.planner.search.plan_block import Columns


@dataclass(frozen=True)
class SearchScope:
    """The input of one search by closed forms: the job, the space of its plans, and the limits of the result.

    `rows` are the degrees of the space. Plans of `num_shown` kinds are wanted that fit in `room` bytes of a device.
    `memo` keeps results for the model and the cluster, and `corrections` are those of memory by the exact account.
    Plans that surely take more than `most_token_s` seconds a token are left out. With `hosted_only` so are plans that
    fit without state in host memory; a local search may come to one of them. `on_first` gets the seconds a token of the
    fastest plan that was simulated before any is improved or judged.
    """

    job: JobSpec
    constraints: Constraints
    constants: Constants
    rows: Columns
    num_shown: int
    room: float
    memo: Memo = field(default_factory=Memo)
    corrections: Corrections = field(default_factory=Corrections)
    most_token_s: float = math.inf
    hosted_only: bool = False
    on_first: Callable[[float], object] | None = None
