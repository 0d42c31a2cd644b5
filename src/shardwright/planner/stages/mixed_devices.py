"""The best plan on a cluster of several kinds of devices: degrees, sharing and recomputation with the best layout.

To lay out every plan of the space would take too long, so plans are first sorted by the time of an ideal layout: if all
r pipeline ranks were like those of part i, a step would take T_i; if ranks of different parts share the layers so that
all take equally long, a step takes r / sum(r_i / T_i). The first plans in this order are laid out in full. Only 1F1B is
tried, for which a layout is exact.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.phrase import both, say
from shardwright.config.progress_records import tell_share
from shardwright.cost.calibration import Constants, device_of
from shardwright.layers.memo import Memo
from shardwright.memory.rank_estimate import peak_memory
from shardwright.planner.search.constraints import Constraints
from shardwright.planner.search.known_strategies import within_known
from shardwright.planner.search.plan_block import Column, PlanBlock, rank_grid, select
from shardwright.planner.search.space import degrees, variants_of, with_sharing, with_variant
from shardwright.planner.stages.best_layout import LaidOut, best_layout
from shardwright.simulate.closed_form import step_time

_ENOUGH_FIT = 24  # plans that fit, after which the search stops
_TRIED = 80  # plans that are laid out at most
_ALIKE = 4  # of them, that have the same degrees: further ones hardly differ
# A plan is tried if its estimate is at most this multiple of the memory: a layout can take layers from a full rank.
_MEMORY_SLACK = 1.1


def best_mixed(job: JobSpec, constraints: Constraints, constants: Constants) -> LaidOut:
    """The fastest of the plans that were laid out. PlanError if none fits; KeyError names what is unknown."""
    if not job.cluster.parts:
        fault = say("cluster.parts is empty, so devices are of one kind; leave --search out, or use `shardwright plan`")
        raise PlanError(say("plans for {name} on parts of a cluster", name=job.model.name), [fault])
    constraints, _ = within_known(job, constraints)  # the sentences on strategies that were left out are not shown
    best: LaidOut | None = None
    num_fit = 0
    for tried, planned in enumerate(_most_promising(job, constraints, constants)):
        if tried == _TRIED or num_fit == _ENOUGH_FIT:
            break
        tell_share(say("laying out the most promising plans"), tried / _TRIED)
        try:
            laid_out = best_layout(planned, constants)
        except PlanError:
            continue
        num_fit += 1
        if best is None or laid_out.step_s < best.step_s:
            best = laid_out
    if best is None:
        fault = say(
            "none of the most promising fits with 1F1B and stages that lie within parts of {sizes} devices; use "
            "another batch.global_batch_size, more devices, or fewer --keep",
            sizes=both([str(part.num_devices) for part in job.cluster.parts]),
        )
        raise PlanError(
            say(
                "plans for {name} on the parts of cluster {cluster}",
                name=job.model.name,
                cluster=repr(job.cluster.name),
            ),
            [fault],
        )
    return best


def _most_promising(job: JobSpec, constraints: Constraints, constants: Constants) -> Iterator[JobSpec]:
    """Yield jobs under plans, in the order of the time of their ideal layouts."""
    rows = degrees(job, constraints)
    ranks = rank_grid(rows)
    stage, is_whole = ranks.stage_ranks, ranks.block == ranks.stage_ranks  # on devices of one kind
    rows = select(rows, is_whole & np.all([part.num_devices % stage == 0 for part in job.cluster.parts], axis=0))
    promising: list[tuple[float, int, PlanBlock]] = []
    if len(rows["dp"]):
        for variant in variants_of(job, constraints, rows):
            block = with_variant(job, constraints, rows, replace(variant, schedule="1f1b"))
            if variant.schedule == "1f1b" and len(block):
                block = with_sharing(job, constraints, block)
                ideal_s = _ideal_s(job, block, constants)
                best_rows = np.argsort(ideal_s, kind="stable")[:_TRIED]
                promising += [(float(ideal_s[n]), int(n), block) for n in best_rows if np.isfinite(ideal_s[n])]
    num_of_degrees = Counter[tuple[int, ...]]()
    for _, index, block in sorted(promising, key=lambda entry: entry[0]):
        degrees_key = tuple(int(block.columns[name][index]) for name in ("tp", "pp", "cp", "dp", "ep"))
        num_of_degrees[degrees_key] += 1
        if num_of_degrees[degrees_key] <= _ALIKE:
            yield block.plan(index, job)


def _ideal_s(job: JobSpec, block: PlanBlock, constants: Constants) -> Column:
    """Seconds of a step with an ideal layout, by plan; infinite if memory is much too small for it."""
    stage = rank_grid(block.columns).stage_ranks
    part_jobs = [job.model_copy(update={"cluster": job.cluster.alone(part)}) for part in job.cluster.parts]
    runs = [block.run(part, Memo()) for part in part_jobs]
    step_s = [np.asarray(step_time(run, constants).total) for run in runs]
    ranks = [part.num_devices // stage for part in job.cluster.parts]
    ideal_s = sum(ranks) / sum(num_ranks / seconds for num_ranks, seconds in zip(ranks, step_s, strict=True))
    for run, seconds in zip(runs, step_s, strict=True):
        # A rank has as many more layers than with an even layout as it is faster than the ideal pace.
        needed_bytes = np.asarray(peak_memory(run, constants).process) * np.minimum(1.0, ideal_s / seconds)
        ideal_s = np.where(needed_bytes <= _MEMORY_SLACK * device_of(run.device).offered_bytes, ideal_s, np.inf)
    return ideal_s
