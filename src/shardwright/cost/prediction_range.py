"""The range that four of five steps lie in, by what is known of a run before it is predicted.

Its ends are measured over predicted seconds of dense models of usual size on devices to which rates are fitted. Each
fact that makes a prediction less sure widens it on both sides: deviations of the logarithm add as squares do. That of
experts counts by the share of the step that they take. The ends and the spread of each fact are those of runs to which
nothing was fitted (benchmarks/fit_range.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np

from shardwright.config import catalog
from shardwright.config.number_types import NUMBER_TYPES
from shardwright.cost.calibration import Constants, device_constant, device_of
from shardwright.layers.arrays import Numbers
from shardwright.layers.query import Run

FACTS = ("device", "experts", "small", "software")
_FEWEST_FAMILIES = 2  # of runs that tell a rate, or it is thought to be unknown
_SMALL = 1024  # largest hidden size of models whose steps are launches of the host more than work of the device


@lru_cache(maxsize=1)
def families_by_constant() -> Mapping[str, Sequence[str]]:
    """The families of published runs that each fitted constant is fitted to."""
    return catalog.read_fitted()


def range_ends(
    run: Run,
    constants: Constants,
    *,
    expert_share: Numbers = 1.0,
    is_named: bool = True,
    fitted: Mapping[str, Sequence[str]] | None = None,
) -> tuple[Numbers, Numbers]:
    """Measured over predicted seconds at the (lower, upper) end. `expert_share` is the share of the step that experts
    take, where there are some; `is_named`: something says what software runs.

    `fitted` has the families of runs that each constant is fitted to; None is what the catalog says.
    """
    device = device_of(run.device)
    facts = unsure_facts(run, is_named=is_named, fitted=families_by_constant() if fitted is None else fitted)
    spreads = {fact: device_constant(constants, device, f"{fact}_range") for fact in facts}
    width = range_width(spreads, expert_share)
    return device_constant(constants, device, "low") ** width, device_constant(constants, device, "high") ** width


def range_width(spreads: Mapping[str, float], expert_share: Numbers) -> Numbers:
    """The logarithm of a range's end over that of a usual run, by the spread of each fact that makes it less sure."""
    shares: dict[str, Numbers] = {"experts": expert_share}
    return np.sqrt(1 + sum((spread * shares.get(fact, 1.0)) ** 2 for fact, spread in spreads.items()))


def share_of_experts(run: Run, *, sent_s: Numbers, computed_s: Numbers, total_s: Numbers) -> Numbers:
    """The share of a step that experts take: the exposed journeys of tokens to them and back (`sent_s`), and of
    computation (`computed_s`, of `total_s`) as much as of the model's FLOPs."""
    shape = run.shape
    if shape.experts is None:
        return 0.0
    used = sum(matrix.num_elements for matrix in shape.routed_matrices) * shape.experts.topk / shape.experts.num
    num_layers = sum(not shape.is_dense(layer) for layer in range(shape.layers))
    return (sent_s + computed_s * 6.0 * used * num_layers / shape.flops_per_token()) / total_s


def unsure_facts(run: Run, *, is_named: bool, fitted: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The facts of a run that make its prediction less sure, of `FACTS`.

    `device`: the rate of its products is told by fewer than two families of runs, or under another power limit.
    `experts`: the model has some. `small`: its layers are so small that the host sets the pace, and nobody measured the
    device. `software`: it is not known.
    """
    if not _is_rate_known(run, fitted):
        yield "device"
    if run.shape.experts:
        yield "experts"
    if run.shape.hidden <= _SMALL and not device_of(run.device).measured:
        yield "small"
    if not is_named:
        yield "software"


def _is_rate_known(run: Run, fitted: Mapping[str, Sequence[str]]) -> bool:
    """False if too few runs tell the rate of the run's products on its device, and nobody measured it there."""
    device = device_of(run.device)
    product = NUMBER_TYPES[run.grid.precision].product_constant or "product"
    if device.measured or (device.constants is not None and product in device.constants.model_fields_set):
        return True
    return not device.same_chip and len(fitted.get(f"{device.generation}.{product}", ())) >= _FEWEST_FAMILIES
