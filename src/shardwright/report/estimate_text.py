"""Text of the command `estimate`: the memory account of a job, by pipeline rank, and the verdict on its fit; and the
table of one plan with every generation of software in the catalog.

If the cluster's device is known, also time, MFU, money, energy and time lost to failures (report/step_cost.py).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwright.config import catalog
from shardwright.config.cluster_facts import host_memory_bytes
from shardwright.config.job import JobSpec
from shardwright.config.model import ModelSpec
from shardwright.config.percent import percent_text
from shardwright.config.phrase import ENGLISH, note_phrase, say
from shardwright.config.software import software_of
from shardwright.config.software_support import missing_features
from shardwright.config.units import counted_phrase, memory_text, seconds_text
from shardwright.memory.job_memory import job_memory
from shardwright.report.document import AlignedRows, Lines, Paragraph, Part, document_text, paragraph
from shardwright.report.fit_verdict import (
    Fit,
    checkpoint_note,
    device_entry,
    device_room_bytes,
    fit_of,
    kinds_sentences,
    verdict_sentences,
)
from shardwright.report.nearest_text import NearestPlans, near_plans, nearest_dicts, nearest_part
from shardwright.report.prediction_notes import batch_notes, job_notes
from shardwright.schedule.job_program import job_program
from shardwright.sharding.memory_account import DEVICE_KINDS, RankMemory
from shardwright.sharding.stage_parameters import (
    num_active_parameters,
    num_parameters,
    num_trained_parameters,
    stage_parameters,
)

if TYPE_CHECKING:
    from shardwright.planner.advice.repair import Near
    from shardwright.planner.own_plan import Estimate

KINDS = (*DEVICE_KINDS, "total")


def _priced(job: JobSpec) -> "Estimate | str":
    """The price of the plan; or the reason why it is unknown, and the field to set."""
    if job.cluster.device == "unknown":
        return say(
            "Time, money and energy are not said: set cluster.device, and the bandwidths of the cluster's links."
        )
    from shardwright.planner.own_plan import estimate  # needs numpy, which the memory account does not

    try:
        return estimate(job)
    except (KeyError, ValueError) as error:
        return say("Time, money and energy are not said: {reason}.", reason=error.args[0])


def _accounts(job: JobSpec) -> list[RankMemory]:
    """The accounts of all pipeline ranks, which the price of a plan takes as well."""
    if job.cluster.device == "unknown":
        return job_memory(job)
    from shardwright.memory.job_memories import job_accounts  # needs numpy, as prices do

    return job_accounts(job)


def estimate_dict(job: JobSpec, nearest: NearestPlans | None = None) -> dict[str, Any]:
    """An estimate for `--json`. Bytes, seconds, US dollars; null is unknown. `nearest` has the plans near to its job's,
    for those who ask for its text, too."""
    memory, priced = _accounts(job), _priced(job)
    room, fit = device_room_bytes(job), fit_of(job, memory, priced)
    return {
        "job": job.name,
        "parameters": num_parameters(job.model),
        "active_parameters": num_active_parameters(job.model),
        "trained_parameters": num_trained_parameters(job.model),
        "memory": [rank.as_dict() for rank in memory],
        "device_memory_bytes": None if room is None else int(device_entry(job).memory_bytes),
        "device_room_bytes": room,
        "host_memory_bytes": host_memory_bytes(job.cluster),
        "fits": fit.fits if fit else None,
        "nearest": nearest_dicts(job, _near_plans(nearest or NearestPlans(job), fit, priced)),
        "notes": _notes(job, memory),
        **_takes_dict(job, priced),
    }


def _notes(job: JobSpec, memory: list[RankMemory]) -> list[str]:
    """All notes on an estimate."""
    return [*job_notes(job), *batch_notes(job), *checkpoint_note(job, memory)]


def _near_plans(nearest: NearestPlans, fit: Fit | None, priced: "Estimate | str") -> "list[Near]":
    """Plans that fit, if this one does not; none for one without a price."""
    return [] if isinstance(priced, str) else near_plans(nearest, bool(fit and fit.fits), priced)


def _nearest(nearest: NearestPlans, fit: Fit | None, priced: "Estimate | str") -> list[Part]:
    """Plans that fit, if this one does not."""
    if isinstance(priced, str) or fit is None or fit.fits:
        return []
    return [nearest_part(nearest.job, near_plans(nearest, False, priced), nearest.origin)]


def _takes_dict(job: JobSpec, priced: "Estimate | str") -> dict[str, Any]:
    if isinstance(priced, str):
        return {"not_priced": priced}
    from shardwright.report.step_cost import price_dict

    kinds = {f"{name}_bytes": float(value) for name, value in priced.memory.on_device().items()}
    return price_dict(job, priced) | {"process_kinds": kinds}


def _takes_parts(job: JobSpec, priced: "Estimate | str") -> list[Part]:
    if isinstance(priced, str):
        return [paragraph(priced)]
    from shardwright.report.step_cost import price_parts

    return price_parts(job, priced)


def estimate_text(job: JobSpec, language: str = ENGLISH) -> str:
    """An estimate as text."""
    return document_text(estimate_parts(job), language)


def estimate_parts(job: JobSpec, nearest: NearestPlans | None = None) -> list[Part]:
    """An estimate as paragraphs and tables; `nearest` as in `estimate_dict`."""
    plan, memory, priced = job.plan, _accounts(job), _priced(job)
    placement = job_program(job).placement
    kinds = [*KINDS, "host"] if any(account.host_bytes for account in memory) else KINDS
    rows: list[list[str]] = [[say("pp rank"), say("layers"), *map(say, kinds), say("state a parameter")]]
    for rank, account in enumerate(memory):
        regions_by_stage = [stage_parameters(job.model, plan, stage) for stage in placement.stages_of(rank)]
        layers = sum(region.isdigit() for regions in regions_by_stage for region in regions)
        places = (place for regions in regions_by_stage for places in regions.values() for place in places)
        elements = sum({place.name: place.num_elements for place in places}.values())
        values = account.as_dict()
        bytes_by_kind = [memory_text(values[f"{kind}_bytes"]) for kind in kinds]
        rows.append([str(rank), str(layers), *bytes_by_kind, f"{account.state_bytes / elements:.2f} B"])
    heading = say(
        "{job}: {parameters} on {ranks}, {degrees}, {ep}ZeRO {zero}, {schedule}, {microbatches} of {size}, computed in "
        "{compute}",
        job=job.name,
        parameters=parameters_text(job.model),
        ranks=counted_phrase(plan.world, "rank"),
        degrees=plan.degrees,
        ep=f"ep {plan.ep}, " if plan.ep > 1 else "",
        zero=plan.zero,
        schedule=plan.schedule,
        microbatches=counted_phrase(job.num_microbatches, "microbatch"),
        size=plan.microbatch_size,
        compute=job.precision.compute,
    )
    note = say(
        "Of the tensor-parallel rank that holds most. Parameters, gradients and optimizer state are exact; activations "
        "are what is kept for the backward, buffers are at their peak, and working memory is what operators need while "
        "they run. The last column is parameters, gradients and optimizer state by the "
        "parameters of the rank's stages."
    )
    notes = [paragraph(note_phrase(note)) for note in _notes(job, memory)]
    fit = fit_of(job, memory, priced)
    verdict = [
        paragraph(*verdict_sentences(job, fit), *kinds_sentences(fit)),
        *_nearest(nearest or NearestPlans(job), fit, priced),
    ]
    return [
        Paragraph((heading,), hang="  "),
        paragraph(note),
        AlignedRows(rows),
        *verdict,
        *_takes_parts(job, priced),
        *notes,
    ]


def parameters_text(model: ModelSpec) -> str:
    """The number of a model's parameters, "8,000 parameters"; with experts the number that computes a token, with
    adapters the number that is trained."""
    if model.is_adapted and model.adapter.base == "nf4":
        return say(
            "adapters of rank {rank}: {trained:,} of {parameters:,} parameters are trained, beside layers in NF4",
            rank=model.adapter.rank,
            trained=num_trained_parameters(model),
            parameters=num_parameters(model),
        )
    if model.is_adapted:
        return say(
            "adapters of rank {rank}: {trained:,} of {parameters:,} parameters are trained",
            rank=model.adapter.rank,
            trained=num_trained_parameters(model),
            parameters=num_parameters(model),
        )
    if model.moe.experts:
        return say(
            "{parameters:,} parameters ({active:,} compute a token)",
            parameters=num_parameters(model),
            active=num_active_parameters(model),
        )
    return say("{parameters:,} parameters", parameters=num_parameters(model))


@dataclass(frozen=True)
class SoftwareRow:
    """A plan with one generation of software: its step, the memory of its fullest process, and the strategies of the
    plan that the software lacks."""

    software: str
    step_s: float
    mfu: float
    process_bytes: int
    lacks: tuple[str, ...]


def software_rows(job: JobSpec) -> list[SoftwareRow]:
    """The plan with the job's own software first, then with all others of the catalog, fastest first.

    KeyError names an unknown number of the job's device."""
    own_software = job.cluster.software
    others = () if job.model.is_adapted else catalog.names("software")  # whose adapters are not described
    rows = [_software_row(job, name) for name in dict.fromkeys((own_software, *others))]
    return [rows[0], *sorted(rows[1:], key=lambda row: row.step_s)]


def _software_row(job: JobSpec, name: str) -> SoftwareRow:
    from shardwright.cost.calibration import shipped
    from shardwright.memory.job_memories import fullest
    from shardwright.simulate.full_step import simulated_step

    job = job.model_copy(update={"cluster": job.cluster.model_copy(update={"software": name})})
    step, memory = simulated_step(job, shipped()), fullest(job, shipped())
    return SoftwareRow(
        name, float(step.total), float(step.mfu), int(memory.process), missing_features(software_of(name), job)
    )


def software_table(rows: list[SoftwareRow]) -> Part:
    """The plans as a table."""
    table: list[list[str]] = [[say("software"), say("step"), "MFU", say("process"), say("lacks")]]
    for row in rows:
        lacking = say("{listed}", listed=row.lacks)
        table.append(
            [row.software, seconds_text(row.step_s), percent_text(row.mfu), memory_text(row.process_bytes), lacking]
        )
    heading = say("The same plan with other software (--as NAME prices all of it so):")
    return Lines((heading, AlignedRows(table, left=(0, 4))))
