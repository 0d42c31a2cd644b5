"""The answer to a state of the page, in parts: what is quick to compute comes first, and the page shows it at once."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256

from shardwright.config import catalog
from shardwright.config.base import PlanError
from shardwright.config.catalog_entry import read_entry
from shardwright.config.cluster import ClusterSpec, DeviceSpec
from shardwright.config.dotted_keys import flat_keys
from shardwright.config.job import JobSpec
from shardwright.config.load import validate_fields
from shardwright.config.model import ModelSpec
from shardwright.config.phrase import ENGLISH
from shardwright.cost.calibration import shipped
from shardwright.report.plan_parts import PARTS, Part, PredictedPlan
from shardwright.simulate.closed_form import StepTime
from shardwright.studio.controls import on_page
from shardwright.studio.page_state import SECTIONS, PageState

PRICED = ("job", "step")  # parts that tell of money and failures, too
# Fields of a cluster that only money and failures depend on.
PRICES = (
    "name",
    "usd_per_device_hour",
    "power_share",
    "pue",
    "hours_between_failures",
    "checkpoint_gb_per_s",
    "restart_s",
)


class PlanAnswers:
    """The answers to states. The last ones are kept, for a page asks for a state's parts one after another, and goes
    back to states that it has left. Plans that differ in prices alone share all that prices do not change. Legends are
    and notes are in a language; other texts are phrases."""

    def __init__(self, language: str = ENGLISH) -> None:
        self._language = language
        self._prediction = lru_cache(maxsize=16)(self._predicted)
        self._unpriced = lru_cache(maxsize=16)(lambda key: PredictedPlan(key.job, language=language))
        self._known_part = lru_cache(maxsize=64)(lambda key, name: PARTS[name](self._unpriced(key)))
        self._model: ModelSpec | None = None

    def parts(self, state: PageState, wanted: Sequence[str], known: Mapping[str, str] | None = None) -> Iterator[Part]:
        """The parts of `wanted`, in their order. If there are faults, they come in place of all but `values`.

        A part may have a key: one that the page has already, by the keys in `known`, comes without its content.
        """
        try:
            if "values" in wanted:
                yield {"part": "values", "values": _values(state)}
            key, plan = self._prediction(state)
        except PlanError as error:
            yield fault_part(error)
            return
        for name in wanted:
            if name == "job":
                content = PARTS[name](plan)
                yield {"part": name} | content | {"notes": [on_page(note, self._language) for note in content["notes"]]}
            elif name in PRICED:
                content = PARTS[name](plan)
                untimed = {"untimed": on_page(content["untimed"], self._language)} if "untimed" in content else {}
                yield {"part": name} | content | untimed
            elif name in PARTS:
                content = {} if (known or {}).get(name) == key.text else self._known_part(key, name)
                yield {"part": name, "key": key.text} | content

    def known_step(self, state: PageState) -> StepTime | None:
        """The time of the step of a state, if it is computed already; None without one, too."""
        try:
            return self._prediction(state)[1].known_step
        except PlanError:
            return None

    def take_step(self, state: PageState, step: StepTime) -> None:
        """Take the time of the step of a state, which somebody else has computed."""
        with suppress(PlanError):  # the answer has the faults
            self._prediction(state)[1].take_step(step)

    def _predicted(self, state: PageState) -> "tuple[_UnpricedKey, PredictedPlan]":
        """The plan that a state describes, and the key of all plans that differ from it in prices alone. Raises
        PlanError."""
        job = state.job()
        if job.model == self._model:  # what is known of a model is kept by its identity
            job = job.model_copy(update={"model": self._model})
        self._model = job.model
        key = _UnpricedKey(job)
        return key, PredictedPlan(job, state.asked.notes, self._unpriced(key), self._language)


def fault_part(error: PlanError) -> Part:
    """The faults of what was asked for, in place of an answer."""
    return {"part": "faults", "faults": error.faults, "way_out": error.way_out}


class _UnpricedKey:
    """A job that equals all others with the same fields, but for prices."""

    def __init__(self, job: JobSpec) -> None:
        usual = {name: ClusterSpec.model_fields[name].default for name in PRICES}
        self.job = job.model_copy(update={"cluster": job.cluster.model_copy(update=usual)})
        self.text = sha256(self.job.model_dump_json().encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _UnpricedKey) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


def _values(state: PageState) -> Part:
    """The values of all fields of the page, whether or not they can run. Raises PlanError with faults of fields."""
    spec, faults = validate_fields(state.fields)
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
