"""One step of a job as a story: the split of the batch, the groups of ranks, the contents of each device, the work of a
microbatch in each layer, the traffic on each link, and the sum.

All numbers come from the prediction, the memory account and the layout table: this file puts them in the order in which
a step meets them. If the device is unknown there are no seconds, and `untimed` says why.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.plan import chunks_per_rank
from shardwright.cost.calibration import shipped
from shardwright.cost.piece_time import PieceTime
from shardwright.explain.contradictions.claims_on_job import contradictions
from shardwright.explain.contradictions.told_claim import Contradiction
from shardwright.explain.expert_homes import ExpertPlacement, expert_placement
from shardwright.explain.operator_passes import PiecePass
from shardwright.explain.rank_collectives import Crossing
from shardwright.explain.rank_groups import RankGroup, first_node, rank_order
from shardwright.explain.step_traffic import Link, step_traffic
from shardwright.explain.strategy_effects import Effect, effects
from shardwright.memory.job_memories import job_accounts, job_memories
from shardwright.memory.rank_estimate import Memory
from shardwright.memory.step_collectives import PieceKind
from shardwright.memory.tensor_table import RegionLayout, layouts
from shardwright.schedule.schedule import Program
from shardwright.sharding.memory_account import RankMemory
from shardwright.simulate.closed_form import StepTime


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


def tell(job: JobSpec) -> Story:
    """The story of a job that was checked (cli_job.load)."""
    traffic = step_traffic(job)
    priced, rank, groups = traffic.priced, traffic.rank, traffic.groups
    shown_ranks = _told(job, rank)
    memory = dict(zip(shown_ranks, job_accounts(job, shown_ranks), strict=True))
    fullest = max(memory, key=lambda rank: memory[rank].total_bytes)
    return Story(
        job=job,
        program=traffic.program,
        order=rank_order(job),
        first_node=first_node(job),
        portions=portions(job),
        groups=groups,
        experts=_experts(job, groups),
        memory=memory,
        predicted=[] if priced is None else job_memories(job, shipped()),
        fullest=fullest,
        effects=list(effects(job, fullest, memory[fullest])),
        passes=traffic.passes,
        rank=rank,
        pieces=traffic.pieces[rank],
        times=traffic.times,
        crossings=traffic.crossings,
        step=None if priced is None else priced.step,
        links=traffic.links,
        untimed=traffic.untimed,
        layouts=layouts(job),
        contradictions=contradictions(job),
    )


def _experts(job: JobSpec, groups: list[RankGroup]) -> ExpertPlacement | None:
    line = next((group for group in groups if group.axis == "ep"), None)
    return expert_placement(job, line.ranks if line else (0,), line.nodes if line else (0,))


def _told(job: JobSpec, rank: int) -> list[int]:
    """The pipeline ranks whose memory is shown: all, or if there are many the first and the last, and the story's."""
    pp, ends = job.plan.pp, _MOST_TOLD // 2
    return sorted({*range(min(pp, ends)), *range(max(0, pp - ends), pp), rank})
