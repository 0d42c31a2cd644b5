"""The traffic of a step: the collectives of the pipeline rank that sets the pace, and the links that they cross."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.config.base import error_text
from shardwright.config.cluster_facts import node_devices
from shardwright.config.job import JobSpec
from shardwright.config.link_words import link_words
from shardwright.config.phrase import say
from shardwright.cost.calibration import shipped, software_under
from shardwright.cost.from_job import run_of
from shardwright.cost.piece_time import PieceTime
from shardwright.cost.stage_time import Costing
from shardwright.explain.operator_passes import PiecePass, piece_passes, rank_pieces
from shardwright.explain.rank_collectives import Crossing, PipelineRank, PricedGroups, crossings
from shardwright.explain.rank_groups import RankGroup, groups_of_rank_0
from shardwright.layers.query import Run
from shardwright.memory.step_collectives import PieceKind
from shardwright.schedule.job_program import job_program
from shardwright.schedule.schedule import Program
from shardwright.simulate.closed_form import StepTime
from shardwright.simulate.full_step import simulated_step

_ORDER = ("embedding", "dense", "experts", "mtp", "head")


@dataclass(frozen=True)
class Link:
    """Bandwidth of one device in one direction, in bytes per second: the maker's, and the calibrated one."""

    name: str
    peak_bytes_per_s: float
    reached_bytes_per_s: float


@dataclass(frozen=True)
class LinkUse:
    """The bytes that a rank sends over a kind of link in a step; and as a share of what that could carry meanwhile, by
    its maker's bandwidth, None without a time. Runs are measured by the same share (train/step_metrics.py)."""

    place: str  # inside or between, as in SentBytes
    link: Link
    sent_bytes: float
    share: float | None


def link_uses(
    job: JobSpec, links: Sequence[Link], collectives: Sequence[Crossing], step_s: float | None
) -> list[LinkUse]:
    """The use of each link by the collectives of a step."""
    inside_name, uses = link_words(job.cluster).inside, []
    for link in links:
        place = "inside" if link.name == inside_name else "between"
        sent_bytes = sum(getattr(crossing.sent, place) for crossing in collectives)
        uses.append(LinkUse(place, link, sent_bytes, sent_bytes / link.peak_bytes_per_s / step_s if step_s else None))
    return uses


@dataclass(frozen=True)
class StepTraffic:
    """The collectives of `rank`, the pipeline rank that sets the pace, and what they follow from. `times` are of each
    kind of piece, empty without a price, for which `untimed` then has the reason; `pieces` are numbers by pipeline rank
    and kind, per microbatch."""

    program: Program
    groups: list[RankGroup]
    priced: PricedGroups | None
    untimed: str
    pieces: list[dict[PieceKind, int]]
    times: Mapping[PieceKind, PieceTime]
    rank: int
    passes: list[PiecePass]
    crossings: list[Crossing]
    links: list[Link]


def step_traffic(job: JobSpec, step: StepTime | None = None) -> StepTraffic:
    """The traffic of a step of a checked job. `step` is its time, if the caller has it already."""
    (run, gap), program = _run(job), job_program(job)
    priced, untimed = _priced(job, run, gap, step)
    pieces = rank_pieces(run)
    costing = None if priced is None else priced.costing
    kinds = _kinds(pieces)
    times = {} if costing is None else {kind: costing.piece(*kind) for kind in kinds}
    rank = _slowest(pieces, times)
    groups = groups_of_rank_0(job, program.placement)
    passes = piece_passes(job, run, software_under(run), costing, kinds=kinds)
    place = PipelineRank(job, program, rank, pieces[rank])
    return StepTraffic(
        program=program,
        groups=groups,
        priced=priced,
        untimed=untimed,
        pieces=pieces,
        times=times,
        rank=rank,
        passes=passes,
        crossings=crossings(place, passes, groups, priced),
        links=[] if costing is None else _links(job, run, costing),
    )


def _kinds(pieces: Sequence[Mapping[PieceKind, int]]) -> list[PieceKind]:
    """All kinds of pieces, in the order of the computation."""
    kinds = dict.fromkeys(kind for of_rank in pieces for kind in of_rank)
    return sorted(kinds, key=lambda kind: _ORDER.index(kind[0].split()[0]))


def _slowest(pieces: Sequence[Mapping[PieceKind, int]], times: Mapping[PieceKind, PieceTime]) -> int:
    """The pipeline rank that sets the pace; the first rank if times are unknown."""
    seconds = [sum(count * times[kind].total for kind, count in counts.items() if times) for counts in pieces]
    return seconds.index(max(seconds))


def _links(job: JobSpec, run: Run, costing: Costing) -> list[Link]:
    """Links that the job's ranks use."""
    rates, words, world = costing.rates, link_words(job.cluster), job.plan.world
    node_size = node_devices(job.cluster) or world
    return [
        *[Link(words.inside, run.node_bytes_per_s, rates.link_bytes_per_s)] * (min(node_size, world) > 1),
        *[Link(words.between, run.network_bytes_per_s, rates.network_bytes_per_s)] * (world > node_size),
    ]


def _run(job: JobSpec) -> tuple[Run, str]:
    """The job on its cluster; or, with the reason, on an unknown device if something about the cluster is unknown."""
    try:
        return run_of(job), ""
    except KeyError as error:
        nowhere = job.cluster.model_copy(update={"device": "unknown"})
        return run_of(job.model_copy(update={"cluster": nowhere})), error_text(error)


def _priced(job: JobSpec, run: Run, gap: str, step: StepTime | None) -> tuple[PricedGroups | None, str]:
    """The prediction of the step, or the reason why there is none."""
    if gap:
        return None, gap
    if run.device == "unknown":
        return None, say("cluster.device is unknown; set it to one that `shardwright devices` lists, such as h100-sxm")
    try:
        return PricedGroups(Costing.of(run, shipped()), step or simulated_step(job, shipped())), ""
    except (KeyError, ValueError) as error:
        return None, error_text(error)
