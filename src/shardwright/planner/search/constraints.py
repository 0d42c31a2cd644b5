"""Constraints that a user puts on a search: fixed fields of the plan, ranges of others, the batches to try."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.config import largest
from shardwright.config.base import PlanError, shortened
from shardwright.config.field_texts import field_faults
from shardwright.config.phrase import say
from shardwright.config.plan import PlanSpec
from shardwright.config.rank_order import DEFAULT_ORDER
from shardwright.config.software import SoftwareSpec
from shardwright.config.software_support import had_by
from shardwright.config.toml_file import TOML_ERRORS, parse_toml
from shardwright.planner.search.plan_block import NUMBERS, PlanVariant

SEARCHED = tuple(
    name for name in (*NUMBERS, *PlanVariant.__dataclass_fields__) if name not in ("global_batch_size", "float8")
)
# Fields that a search chooses by other means than by their values, with the value that is always possible.
_USUAL_ALONE: dict[str, Any] = {"layout": [], "zero_ranks": 0}
RANGES = ("microbatch_size", "tp", "pp", "cp", "dp", "ep", "virtual_stages")


@dataclass(frozen=True)
class Constraints:
    """Fixed fields of the plan (`keep`), and ranges of others (`between`, both ends included), by name without section.

    `global_batch` is a range of sequences in a step, `float8` a recipe that may be chosen besides the job's precision,
    `among` has the allowed values of some fields, and `excluded` values that are not.
    """

    keep: Mapping[str, Any] = field(default_factory=dict)
    between: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    global_batch: tuple[int, int] | None = None
    float8: str = "none"
    among: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    excluded: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if faults := _unsearched_faults(self.keep, self.between):
            raise PlanError(say("what the search may choose"), faults)

    def allows(self, name: str, value: object) -> bool:
        """True if a field may have a value."""
        if name in self.keep and self.keep[name] != value:
            return False
        if value in self.excluded.get(name, ()) or (name in self.among and value not in self.among[name]):
            return False
        low, high = self.between.get(name, (None, None))
        return low is None or high is None or low <= value <= high  # type: ignore[operator]

    def allows_schedule(self, schedule: str, *, has_stages: bool) -> bool:
        """True if plans of several stages, or of one, may stand under a schedule. One stage has nothing to order and
        stands under 1f1b, which software need not have for it."""
        if self.allows("schedule", schedule) or has_stages or schedule != "1f1b":
            return self.allows("schedule", schedule)
        return replace(self, among={}).allows("schedule", schedule)

    def with_kept(self, fields: Mapping[str, Any]) -> "Constraints":
        """The constraints with further fields of the plan kept. PlanError if they contradict each other."""
        faults = [
            say(
                "--keep plan.{name}={kept} and --set plan.{name}={value} contradict each other; say one of them",
                name=name,
                kept=self.keep[name],
                value=value,
            )
            for name, value in fields.items()
            if self.keep.get(name, value) != value
        ]
        if faults:
            raise PlanError(say("what the search may choose"), faults)
        return replace(self, keep={**self.keep, **fields})

    def without(self, values: Mapping[str, Sequence[Any]]) -> "Constraints":
        """The constraints without some values of fields that are not kept; without any layout, order, or number of
        ranks that share state but the usual one, if one of these is left out."""
        among, excluded, keep = dict(self.among), dict(self.excluded), dict(self.keep)
        for name, left_out in values.items():
            if name in self.keep:
                continue
            if name in _USUAL_ALONE:
                among[name] = (_USUAL_ALONE[name],)
            elif name == "order":
                keep[name] = DEFAULT_ORDER
            else:
                excluded[name] = (*excluded.get(name, ()), *left_out)
        return replace(self, among=among, excluded=excluded, keep=keep)

    def as_software(self, software: SoftwareSpec) -> "Constraints":
        """The constraints, limited to the features of a generation of software. PlanError if these are unknown."""
        supported = had_by(software)
        if not supported:
            fault = say(
                "its entry does not say what it has, so no plan can be held to that; add schedules, zero_stages, "
                "sequence_parallel and context_parallel, or use another cluster.software"
            )
            raise PlanError(say("software {name}", name=software.name), [fault])
        return replace(self, among={**self.among, **supported})

    def batches(self, job_batch: int) -> list[int]:
        """Global batches to try: that of the job, or the range's lower end doubled up to its upper end."""
        if self.global_batch is None:
            return [job_batch]
        low, high = self.global_batch
        doubled = [low << n for n in range(max(1, (high // low).bit_length()))]
        return sorted({size for size in (*doubled, high) if low <= size <= high})


def _unsearched_faults(keep: Iterable[str], between: Iterable[str]) -> list[str]:
    """Fields of a plan that a search does not choose, or whose range it does not take, as messages."""
    kept = [
        say(
            "plan.{name} is not searched, so it can't be kept; there are {fields}",
            name=name,
            fields=tuple(sorted(SEARCHED)),
        )
        for name in keep
        if name not in SEARCHED
    ]
    ranges = [
        say(
            "plan.{name} has no range; there are {fields}, and batch.global_batch_size",
            name=name,
            fields=tuple(sorted(RANGES)),
        )
        for name in between
        if name not in RANGES
    ]
    return [*kept, *ranges]


def whole_number(text: str, most: int) -> int | None:
    """The number from 1 to `most` in a text; None if there is none."""
    is_short = text.isdecimal() and len(text) <= len(str(most))  # Python reads no number of thousands of digits
    return int(text) if is_short and 0 < int(text) <= most else None


def constraints_of(keep: Iterable[str], between: Iterable[str], float8: str = "none") -> Constraints:
    """The constraints of texts such as "plan.tp=8" and "plan.microbatch_size=1,4". PlanError lists the faults."""
    kept: dict[str, Any] = {}
    ranges: dict[str, tuple[int, int]] = {}
    faults: list[str] = []
    for text in keep:
        name, _, value = text.partition("=")
        if not name.startswith("plan.") or not value:
            faults.append(say("--keep {text} is not of the form plan.field=value, such as plan.tp=8", text=repr(text)))
            continue
        plan_field = name.removeprefix("plan.")
        try:
            parsed = parse_toml(f"value = {value}")["value"]
        except TOML_ERRORS:
            parsed = value
        if kept.setdefault(plan_field, parsed) != parsed:
            faults.append(
                say(
                    "--keep {name} is given as {kept} and as {parsed}, and a plan has one of them; keep one, or give "
                    "a range of numbers with --between {name}=low,high",
                    name=name,
                    kept=repr(kept[plan_field]),
                    parsed=repr(parsed),
                )
            )
    faults += field_faults({"plan": {name: value for name, value in kept.items() if name in PlanSpec.model_fields}})
    for text in between:
        name, _, ends = text.partition("=")
        low, _, high = ends.partition(",")
        least, most = whole_number(low, largest.BATCH), whole_number(high, largest.BATCH)
        if least is not None and most is not None and least <= most:
            ranges[name.removeprefix("plan.")] = least, most
            continue
        if least is not None and most is not None:
            faults.append(
                say(
                    "--between {text} begins above its end; use --between {name}={most},{least}",
                    text=repr(shortened(text)),
                    name=name,
                    most=most,
                    least=least,
                )
            )
            continue
        faults.append(
            say(
                "--between {text} is not of the form field=low,high, such as plan.microbatch_size=1,4, with whole "
                "numbers from 1 to {most:,}",
                text=repr(shortened(text)),
                most=largest.BATCH,
            )
        )
    global_batch = ranges.pop("batch.global_batch_size", None)
    faults += _unsearched_faults(kept, ranges)
    if faults:
        raise PlanError(say("what the search may choose"), faults)
    return Constraints(kept, ranges, global_batch, float8)
