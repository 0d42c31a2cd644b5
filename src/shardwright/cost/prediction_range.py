"""The range that four of five steps lie in, by what is known of a run before it is predicted.

Its ends are measured over predicted seconds of dense models of usual size that are like a run to which constants are
fitted (cost/known_runs.py). Each fact that makes a prediction less sure widens it on both sides: deviations of the
logarithm add as squares do. Facts of experts and of the host count by the share of the step that they take. The ends
and the spread of each fact are those of measured runs (benchmarks/fit_range.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np

from shardwright.config import catalog
from shardwright.config.number_types import NUMBER_TYPES
from shardwright.cost.calibration import Constants, device_constant, device_of
from shardwright.cost.known_runs import unlike
from shardwright.layers.arrays import Numbers
from shardwright.layers.query import Run

FACTS = ("unfitted", "unmeasured", "device", "experts", "small", "software", "host")
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
    host_share: Numbers = 0.0,
    fitted: Mapping[str, Sequence[str]] | None = None,
    without: frozenset[str] | None = frozenset(),
) -> tuple[Numbers, Numbers]:
    """Measured over predicted seconds at the (lower, upper) end. `expert_share` and `host_share` are the shares of the
    step that experts take, where there are some, and work on the host.

    `fitted` has the families of runs that each constant is fitted to; None is what the catalog says. Measured runs of
    the families and generations in `without` are left out; None: nothing says what software runs, and so no measured
    run is known to be alike.
    """
    device = device_of(run.device)
    told = families_by_constant() if fitted is None else fitted
    shares: dict[str, Numbers] = dict.fromkeys(unsure_facts(run, is_named=without is not None, fitted=told), 1.0)
    if "experts" in shares:
        shares["experts"] = expert_share
    shares["unfitted"], shares["unmeasured"] = (0.0, 1.0) if without is None else unlike(run, without)
    shares["host"] = host_share
    width = range_width({fact: device_constant(constants, device, f"{fact}_range") for fact in shares}, shares)
    return device_constant(constants, device, "low") ** width, device_constant(constants, device, "high") ** width


def range_width(spreads: Mapping[str, float], shares: Mapping[str, Numbers]) -> Numbers:
    """The logarithm of a range's end over that of a usual run, by the spread of each fact that makes it less sure, and
    the share by which it does."""
    return np.sqrt(1 + sum((spreads[fact] * share) ** 2 for fact, share in shares.items()))


def share_of_experts(run: Run, *, sent_s: Numbers, computed_s: Numbers, total_s: Numbers) -> Numbers:
    """The share of a step that experts take: the exposed journeys of tokens to them and back (`sent_s`), and of
    computation (`computed_s`, of `total_s`) as much as of the model's FLOPs."""
    shape = run.shape
    if shape.experts is None:
        return 0.0
    used = sum(matrix.num_elements for matrix in shape.routed_matrices) * shape.experts.topk / shape.experts.num
    num_layers = sum(not shape.is_dense(layer) for layer in range(shape.layers + shape.mtp))
    flops = 4.0 if shape.is_adapted else 6.0  # an element and token; frozen weights take no gradient
    return (sent_s + computed_s * flops * used * num_layers / shape.flops_per_token()) / total_s


def unsure_facts(run: Run, *, is_named: bool, fitted: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The facts of a run that make its prediction less sure, of `FACTS`, beside those of measured runs and of the host.

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
    is_own = device.constants is not None and product in device.constants.model_fields_set
    if device.measured or (is_own and product not in device.sources):  # a public kernel alone tells no runs
        return True
    return not device.same_chip and len(fitted.get(f"{device.generation}.{product}", ())) >= _FEWEST_FAMILIES
