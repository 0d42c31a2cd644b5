"""One step of a job as a story: the split of the batch, the groups of ranks, the contents of each device, the work of a
microbatch in each layer, the traffic on each link, and the sum.

All numbers come from the prediction, the memory account and the layout table: this file puts them in the order in which
a step meets them. If the device is unknown there are no seconds, and `untimed` says why.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.config import catalog
from shardwright.config.cluster_facts import node_devices
from shardwright.config.job import JobSpec
from shardwright.config.link_words import link_words
from shardwright.config.phrase import say
from shardwright.config.plan import chunks_per_rank
from shardwright.cost.calibration import shipped, software_under
from shardwright.cost.from_job import run_of
from shardwright.cost.piece_time import PieceTime
from shardwright.cost.stage_time import Costing
from shardwright.explain.contradictions.claims_on_job import contradictions
from shardwright.explain.contradictions.told_claim import Contradiction
from shardwright.explain.expert_homes import ExpertPlacement, expert_placement
from shardwright.explain.operator_passes import PiecePass, piece_passes, rank_pieces
from shardwright.explain.rank_collectives import Crossing, PipelineRank, PricedGroups, crossings
from shardwright.explain.rank_groups import RankGroup, first_node, groups_of_rank_0, rank_order
from shardwright.explain.strategy_effects import Effect, effects
from shardwright.layers.query import Run
from shardwright.memory.job_memories import job_memories
from shardwright.memory.job_memory import job_memory
from shardwright.memory.rank_estimate import Memory
from shardwright.memory.step_collectives import PieceKind
from shardwright.memory.tensor_table import RegionLayout, layouts
from shardwright.schedule.job_program import job_program
from shardwright.schedule.schedule import Program
from shardwright.sharding.memory_account import RankMemory
from shardwright.simulate.closed_form import StepTime
from shardwright.simulate.full_step import simulated_step


@dataclass(frozen=True)
class Portion:
    """A part of a step's batch: the part of what it is, the number of such parts in the previous portion, its size."""

    kind: str
    num_parts: int
    num_sequences: int
    num_tokens: int
    why: str


def portions(job: JobSpec) -> list[Portion]:
    """The portions from the global batch down to the tokens that a rank holds between the products of a layer."""
    plan, sequence = job.plan, job.model.sequence
    replica = job.batch.global_batch_size // plan.dp
    micro = plan.microbatch_size
    split_reason = say("dp {dp}: replicas take different sequences", dp=plan.dp)
    accumulation = say("microbatch_size {size}: one passes after the other, and gradients add up", size=micro)
    parts = [
        Portion("step", 1, job.batch.global_batch_size, job.tokens_per_step, why="batch.global_batch_size"),
        Portion("replica", plan.dp, replica, replica * sequence, why=split_reason),
        Portion("microbatch", job.num_microbatches, micro, micro * sequence, why=accumulation),
    ]
    if plan.cp > 1:
        why = say("cp {cp}: ranks share each sequence", cp=plan.cp)
        if chunks_per_rank(plan.cp_method) == 2:
            why = say(
                "cp {cp}: ranks share each sequence, each with a piece from its front and one from its back, for late "
                "tokens see more keys",
                cp=plan.cp,
            )
        parts.append(Portion("cp rank", plan.cp, micro, micro * job.tokens_within, why=why))
    if plan.tp > 1 and plan.sequence_parallel:
        why = say("tp {tp} with sequence parallel: between products ranks share the tokens", tp=plan.tp)
        parts.append(Portion("tp rank, between products", plan.tp, micro, micro * job.tokens_between, why=why))
    if plan.tp > 1:
        why = say("tp {tp}: in products all tokens, for 1/{tp} of heads and inner width", tp=plan.tp)
        parts.append(Portion("tp rank, in products", 1, micro, micro * job.tokens_within, why=why))
    return parts


@dataclass(frozen=True)
class Link:
    """Bandwidth of one device in one direction, in bytes per second: the maker's, and the calibrated one."""

    name: str
    peak_bytes_per_s: float
    reached_bytes_per_s: float


@dataclass(frozen=True)
class Story:
    """The chapters. `rank` is the pipeline rank that sets the pace; crossings and sums are this rank's, and `pieces`
    are its numbers of pieces of each kind per microbatch. `memory` is by pipeline rank, for only some if there are
    many; effects are on the `fullest` of them."""

    job: JobSpec
    program: Program
    order: str
    first_node: Mapping[str, tuple[int, int]]
    portions: list[Portion]
    groups: list[RankGroup]
    experts: ExpertPlacement | None
    memory: Mapping[int, RankMemory]
    predicted: list[Memory]
    fullest: int
    effects: list[Effect]
    passes: list[PiecePass]
    rank: int
    pieces: Mapping[PieceKind, int]
    times: Mapping[PieceKind, PieceTime]
    crossings: list[Crossing]
    step: StepTime | None
    links: list[Link]
    untimed: str
    layouts: list[RegionLayout]
    contradictions: list[Contradiction]

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second, of all devices together."""
        return None if self.step is None else self.job.tokens_per_step / self.step.total


_MOST_TOLD = 8  # pipeline ranks
_ORDER = ("embedding", "dense", "experts", "mtp", "head")


def tell(job: JobSpec) -> Story:
    """The story of a job that was checked (cli_job.load)."""
    (run, gap), program = _run(job), job_program(job)
    priced, untimed = _priced(job, run, gap)
    pieces_of_ranks = rank_pieces(run)
    costing = None if priced is None else priced.costing
    all_kinds = dict.fromkeys(kind for pieces in pieces_of_ranks for kind in pieces)
    kinds = sorted(all_kinds, key=lambda kind: _ORDER.index(kind[0].split()[0]))
    times = {} if costing is None else {kind: costing.piece(*kind) for kind in kinds}
    rank = _slowest(pieces_of_ranks, times)
    groups = groups_of_rank_0(job, program.placement)
    shown_ranks = _told(job, rank)
    memory = dict(zip(shown_ranks, job_memory(job, shown_ranks), strict=True))
    fullest = max(memory, key=lambda rank: memory[rank].total_bytes)
    passes = piece_passes(job, run, software_under(run), costing, kinds=kinds)
    return Story(
        job=job,
        program=program,
        order=rank_order(job),
        first_node=first_node(job),
        portions=portions(job),
        groups=groups,
        experts=_experts(job, groups),
        memory=memory,
        predicted=[] if priced is None else job_memories(job, shipped()),
        fullest=fullest,
        effects=list(effects(job, fullest, memory[fullest])),
        passes=passes,
        rank=rank,
        pieces=pieces_of_ranks[rank],
        times=times,
        crossings=crossings(PipelineRank(job, program, rank, pieces_of_ranks[rank]), passes, groups, priced),
        step=None if priced is None else priced.step,
        links=[] if costing is None else _links(job, run, costing),
        untimed=untimed,
        layouts=layouts(job),
        contradictions=contradictions(job),
    )


def _experts(job: JobSpec, groups: list[RankGroup]) -> ExpertPlacement | None:
    line = next((group for group in groups if group.axis == "ep"), None)
    return expert_placement(job, line.ranks if line else (0,), line.nodes if line else (0,))


def _slowest(pieces_of_ranks: list[dict[PieceKind, int]], times: Mapping[PieceKind, PieceTime]) -> int:
    """The pipeline rank that sets the pace; the first rank if times are unknown."""
    seconds = [sum(count * times[kind].total for kind, count in pieces.items() if times) for pieces in pieces_of_ranks]
    return seconds.index(max(seconds))


def _told(job: JobSpec, rank: int) -> list[int]:
    """The pipeline ranks whose memory is shown: all, or if there are many the first and the last, and the story's."""
    pp, ends = job.plan.pp, _MOST_TOLD // 2
    return sorted({*range(min(pp, ends)), *range(max(0, pp - ends), pp), rank})


def _links(job: JobSpec, run: Run, costing: Costing) -> list[Link]:
    """Links that the job's ranks use."""
    rates, words, world = costing.rates, link_words(job.cluster), job.plan.world
    node_size = node_devices(job.cluster) or world
    return [
        *[Link(words.inside, run.node_bytes_per_s, rates.link)] * (min(node_size, world) > 1),
        *[Link(words.between, run.network_bytes_per_s, rates.network)] * (world > node_size),
    ]


def _run(job: JobSpec) -> tuple[Run, str]:
    """The job on its cluster; or, with the reason, on an unknown device if something about the cluster is unknown."""
    try:
        return run_of(job), ""
    except KeyError as error:
        nowhere = job.cluster.model_copy(update={"device": "unknown"})
        return run_of(job.model_copy(update={"cluster": nowhere})), str(error.args[0])


def _priced(job: JobSpec, run: Run, gap: str) -> tuple[PricedGroups | None, str]:
    """The prediction of the step, or the reason why there is none."""
    if gap:
        return None, gap
    if run.device == "unknown":
        names = ", ".join(catalog.names("devices"))
        return None, f"cluster.device is unknown; set it to one of {names}"
    try:
        return PricedGroups(Costing.of(run, shipped()), simulated_step(job, shipped())), ""
    except (KeyError, ValueError) as error:
        return None, str(error.args[0])
