"""The answer to a state of the page, in parts: what is quick to compute comes first, and the page shows it at once."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

from shardwright.config import catalog
from shardwright.config.base import PlanError
from shardwright.config.catalog_entry import read_entry
from shardwright.config.cluster import DeviceSpec
from shardwright.config.dotted_keys import flat_keys
from shardwright.config.load import validate_fields
from shardwright.cost.calibration import shipped
from shardwright.report.plan_parts import PARTS, Part, PredictedPlan
from shardwright.studio.page_state import SECTIONS, PageState


class PlanAnswers:
    """The answers to states. The last ones are kept, for a page asks for a state's parts one after another, and goes
    back to states that it has left."""

    def __init__(self) -> None:
        self._prediction = lru_cache(maxsize=16)(_prediction)
        self._known_part = lru_cache(maxsize=64)(self._part)

    def parts(self, state: PageState, wanted: Sequence[str]) -> Iterator[Part]:
        """The parts of `wanted`, in their order. If there are faults, they come in place of all but `values`."""
        try:
            if "values" in wanted:
                yield {"part": "values", "values": _values(state)}
            self._prediction(state)
        except PlanError as error:
            yield {"part": "faults", "faults": error.faults, "way_out": error.way_out}
            return
        for name in wanted:
            if name in PARTS:
                yield self._known_part(state, name)

    def _part(self, state: PageState, name: str) -> Part:
        return {"part": name} | PARTS[name](self._prediction(state))


def _prediction(state: PageState) -> PredictedPlan:
    """The plan that a state describes. Raises PlanError."""
    return PredictedPlan(state.job(), state.asked.notes)


def _values(state: PageState) -> Part:
    """The values of all fields of the page, whether or not they can run. Raises PlanError with faults of fields."""
    spec, faults = validate_fields(state.fields())
    if faults:
        raise PlanError(state.asked.subject, faults)
    values = flat_keys(spec.model_dump(mode="json", include=set(SECTIONS)))
    device = spec.cluster.device
    known = {} if device == "unknown" else {"memory_gib": read_entry("devices", device, DeviceSpec).memory_gib}
    shown = catalog.split_memory(device)[0] or device
    return values | {"device": shown, "devices": spec.cluster.num_devices or spec.plan.world} | known


def warm_up() -> None:
    """Import and compute what the first answer would wait for."""
    shipped()
    for _ in PlanAnswers().parts(PageState({"job": "quickstart"}), tuple(PARTS)):
        pass
