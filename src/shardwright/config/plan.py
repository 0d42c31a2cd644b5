"""The plan: how the work of one training step is divided among the ranks."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from shardwright.config import largest
from shardwright.config.array_math import holds
from shardwright.config.base import SectionSpec
from shardwright.config.compression_facts import CompressName
from shardwright.config.context_facts import CONTEXT_METHODS, ContextMethod
from shardwright.config.field_types import Layers, LayersOr0, Ranks, RanksOr0, Sequences, ShareOr0
from shardwright.config.phrase import say
from shardwright.config.rank_order import (
    DEFAULT_ORDER,
    full_order,
    number_of,
    of_stage_on_node,
    stage_block,
    stage_size,
)
from shardwright.config.recompute_facts import RECOMPUTES, RecomputeName
from shardwright.config.recompute_policy import LAYER, OperatorName, Policy, RecomputedName
from shardwright.config.schedule_facts import SCHEDULES, ScheduleName

Reductions = Literal["step", "run", "microbatch"]


def sums_by_run(schedule: str, virtual: Any, reduce_each: str) -> Any:
    """True if sharded gradients are summed after each run (stretch of work on one stage), and not with each microbatch,
    on ranks with `virtual` stages, a number or an array. With a single stage a run would be the entire step, and with
    two alternating stages there are as many runs as microbatches. DualPipe's two copies of a stage are at different
    microbatches."""
    if SCHEDULES[schedule].num_copies > 1 or reduce_each == "run":
        return virtual > 0
    takes_turns = reduce_each == "auto" and SCHEDULES[schedule].stages_per_rank == 0
    return (virtual > 1) & takes_turns


# Fields of a plan that a search keeps as they are: they change what travels, or only how it travels.
UNSEARCHED = ("bucket_mib", "loss_chunk_mib", "compress", "compress_rank", "compress_share", "compress_least")


class FallbackSpec(SectionSpec):
    """Degrees and order of work. The product dp x cp x tp x pp is the number of ranks."""

    dp: Ranks = Field(1, description="Data-parallel degree: replicas that see different samples.")
    tp: Ranks = Field(1, description="Tensor-parallel degree: ranks that share each layer's matrices.")
    pp: Annotated[int, Field(gt=0, le=largest.PIPELINE_RANKS)] = Field(
        1, description="Pipeline-parallel degree: ranks that hold different layers."
    )
    cp: Ranks = Field(1, description="Context-parallel degree: ranks that share each sequence's tokens.")
    cp_method: ContextMethod = Field(
        "ring",
        description="How attention spans the cp ranks. ring: keys and values go around, under the computation; "
        "all-gather: they are gathered at once; ulysses: ranks trade tokens for heads, and each attends with its own.",
    )
    ep: Ranks = Field(
        1,
        description="Expert-parallel degree: ranks that hold different experts; they are ranks of dp and cp, and of tp "
        "where expert_tp is 1.",
    )
    expert_tp: RanksOr0 = Field(0, description="Tensor-parallel degree of the experts: plan.tp or 1; 0 is plan.tp.")
    dispatch: Literal["direct", "node-aware"] = Field(
        "direct",
        description="How tokens cross to experts on other nodes. direct: once for each expert; node-aware: once for "
        "each node, and from there to its experts inside the node.",
    )
    order: Annotated[str, AfterValidator(full_order)] = Field(
        DEFAULT_ORDER,
        description="Order of the axes over the ranks, innermost first: ranks of the first are neighbours. pp-dp puts "
        "the stages of a pipeline inside a node and its replicas across nodes. Of axes left out tp, cp and ep are "
        "innermost, dp and pp outermost.",
    )
    microbatch_size: Sequences = Field(1, description="Sequences in one forward pass of one rank.")
    schedule: ScheduleName = Field("1f1b", description="Order of forward and backward passes in the pipeline.")
    virtual_stages: Layers = Field(
        1,
        description="Pieces of the model that each pipeline rank holds, where the schedule lets you choose: "
        "interleaved-1f1b, looped-bfs and auto (1 or 2).",
    )
    extra_warmup: Annotated[int, Field(ge=0, le=largest.COMPUTATIONS)] = Field(
        0, description="1f1b: more forwards before the first backward, to hide messages at the price of memory."
    )
    most_alive: Annotated[float, Field(ge=0, le=largest.COMPUTATIONS)] = Field(
        0.0, description="auto: most microbatches whose activations a rank keeps; 0 is as many as 1f1b keeps, plan.pp."
    )
    sequence_parallel: bool = Field(
        False, description="Also shard norms and residuals over the sequence among the tp ranks."
    )
    zero: Literal[0, 1, 2, 3] = Field(
        0,
        description="ZeRO stage: what the dp ranks share instead of each holding all of it; 1 optimizer state, 2 "
        "gradients too, 3 parameters too.",
    )
    reduce_each: Literal["auto", "run", "microbatch"] = Field(
        "auto",
        description="ZeRO 2 and 3: when gradients are summed over the replicas. microbatch: with each, unit by unit, "
        "so that no stage has all of its gradients at once; run: after each stretch of work on one stage, which moves "
        "less and holds its gradients whole; auto: run where virtual_stages are several, else microbatch.",
    )
    zero_ranks: RanksOr0 = Field(
        0,
        description="Hybrid sharding: neighbouring dp ranks that share one set of shards, and copies of it over the "
        "others; 0 is all of dp.",
    )
    offload_optimizer: ShareOr0 = Field(
        0.0,
        description="Share of the optimizer state and of float32 master weights that is kept in host memory and "
        "updated there.",
    )
    offload_parameters: bool = Field(
        False, description="ZeRO 3: keep the shards of the parameters in host memory until they are gathered."
    )
    layout: list[LayersOr0] = Field(
        default_factory=list,
        max_length=largest.LAYERS + 2,
        description="Layers of each stage, first to last; empty means as even as possible.",
    )
    recompute: RecomputeName = Field(
        "none", description="What is computed again in the backward instead of being kept."
    )
    recompute_operators: list[OperatorName] = Field(
        ["attention"],
        description="selective: operators that are computed again (norm, qkv, attention, up, activation).",
    )
    recompute_every: Layers = Field(
        1, description="full and selective: only every so many layers, counted in the whole model from layer 0."
    )
    recompute_layers: list[list[RecomputedName]] = Field(
        default_factory=list,
        max_length=largest.LAYERS,
        description="layers: by layer of the model what it computes again, operators or layer; budget chooses it.",
    )
    memory_limit_gib: Annotated[float, Field(ge=0, le=largest.MEMORY_GIB)] = Field(
        0.0, description="budget: most GiB of activations on a rank; what is dearest to compute again is kept."
    )
    offload_activations: bool = Field(
        False, description="full: inputs of layers wait for the backward in host memory, and come back ahead of it."
    )
    bucket_mib: Annotated[float, Field(ge=largest.LEAST_BUCKET_MIB, le=largest.BUCKET_MIB)] = Field(
        25.0, description="Gradients are reduced over dp in buckets of this many MiB, during the backward."
    )
    loss_chunk_mib: Annotated[float, Field(ge=0, le=largest.BUCKET_MIB)] = Field(
        0.0,
        description="MiB of logits, in float32, that a rank computes at once for the loss; 0 is 32 on a CPU, and on "
        "a device 1/32 of its memory or those of 8192 tokens, if these are fewer.",
    )
    compress: CompressName = Field("none", description="How gradients are made smaller on their way over dp.")
    compress_rank: Annotated[int, Field(gt=0, le=largest.WIDTH)] = Field(
        4, description="powersgd: rank of the two factors that a gradient matrix travels as."
    )
    compress_share: Annotated[float, Field(ge=largest.LEAST_RATE, le=1)] = Field(
        0.01, description="topk: share of the gradient elements of a bucket that travel in one step."
    )
    compress_least: Annotated[int, Field(gt=0, le=largest.PARAMETERS)] = Field(
        4096, description="Gradient tensors with fewer elements travel as they are."
    )

    @property
    def stage_ranks(self) -> int:
        """Number of ranks that share the work of one stage."""
        return int(stage_size(self))

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.stage_ranks * self.pp

    @property
    def orders(self) -> tuple[tuple[int, int], ...]:
        """The order of the plan as ((index in ORDERS of rank_order.py, 1),)."""
        return ((number_of(self.order), 1),)

    @property
    def block(self) -> int:
        """Number of neighbouring ranks of one stage, before the ranks of the next stage."""
        return int(stage_block(self))

    @property
    def degrees(self) -> str:
        """The degrees whose product is the number of ranks, in words: "dp 2 x tp 2 x pp 1"."""
        axes = ("dp", "cp", "tp", "pp") if self.cp > 1 else ("dp", "tp", "pp")
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in axes)

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same part of a layer, see different tokens, and sum its gradients."""
        return self.dp * self.cp

    @property
    def shard_copies(self) -> int:
        """Number of copies of a set of shards over the replicas: 1 unless sharding is hybrid."""
        return self.replicas // self.zero_ranks if 0 < self.zero_ranks < self.replicas else 1

    @property
    def expert_tp_size(self) -> int:
        """Number of ranks that share each expert's matrices, with the default filled in."""
        return self.tp if holds(self.expert_tp == 0) else self.expert_tp

    @property
    def trades_heads(self) -> bool:
        """True if ranks of cp exchange tokens for heads, so that attention sees the full sequence of some heads."""
        return holds(self.cp > 1) and CONTEXT_METHODS[self.cp_method].trades_heads

    @property
    def num_copies(self) -> int:
        """Number of copies of each stage in a pipeline: 2 with DualPipe, for its two directions."""
        return SCHEDULES[self.schedule].num_copies

    @property
    def reductions(self) -> Reductions:
        """The time when sharded gradients are summed: after each run or with each microbatch."""
        return "run" if sums_by_run(self.schedule, self.stages_per_rank, self.reduce_each) else "microbatch"

    @property
    def gathers_stages(self) -> bool:
        """True if ZeRO-3 gathers all of a stage at once, between computations. A model in one stage is gathered layer
        by layer, within them.

        Concurrent passes could not gather by layer, because they would share the communicator of the replicas.
        """
        return self.num_stages > 1

    @property
    def stages_per_rank(self) -> int:
        """Number of pieces of the model per pipeline rank. DualPipe's ranks hold two, but the pipeline holds each piece
        twice, so this is 1."""
        return SCHEDULES[self.schedule].stages_per_rank or self.virtual_stages

    @property
    def num_stages(self) -> int:
        """Number of pieces that the model is cut into."""
        return self.pp * self.stages_per_rank

    def stage_layers(self, layers: int) -> list[int]:
        """Number of layers of each stage.

        The remainder goes to the middle stages first, because the first stage also embeds and the last stage also holds
        the head and the loss.
        """
        return list(self.layout) or even_stages(layers, self.num_stages)


class PlanSpec(FallbackSpec):
    """The plan of a job, and the plans to run if there are fewer or more ranks than it needs."""

    fallback: list[FallbackSpec] = Field(
        default_factory=list,
        max_length=largest.FALLBACKS,
        description="Plans for other numbers of ranks, where torchrun starts fewer or more: fields of [plan] each.",
    )

    def unsearched(self) -> "PlanSpec":
        """A plan for one rank with the fields that a search keeps, and defaults for all others."""
        return PlanSpec(**{name: getattr(self, name) for name in UNSEARCHED})

    def fallback_plan(self, number: int) -> "PlanSpec":
        """One of the fallbacks as a plan of its own."""
        fields = {name: getattr(self.fallback[number], name) for name in FallbackSpec.model_fields}
        return PlanSpec.model_construct(_fields_set=self.fallback[number].model_fields_set, **fields)


def even_stages(layers: int, stages: int) -> list[int]:
    """Number of layers of each stage, as even as possible; the middle stages take the remainder."""
    counts = [layers // stages] * stages
    first_to_grow = [*range(1, stages - 1), 0, stages - 1]
    for stage in first_to_grow[: layers % stages]:
        counts[stage] += 1
    return counts


def split_evenly(total: int, parts: int, index: int) -> tuple[int, int]:
    """Half-open range `index` of `parts` nearly equal ranges of `total`; the first `total % parts` are one longer."""
    size, longer = divmod(total, parts)
    start = index * size + min(index, longer)
    return start, start + size + (index < longer)


def chunks_per_rank(method: str) -> int:
    """Number of contiguous chunks of a rank's positions, under a context method."""
    return CONTEXT_METHODS[method].chunks


def ep_ranks_of_node(plan: PlanSpec, ranks_per_node: int) -> int:
    """Number of ranks of one ep line that share a node of `ranks_per_node` neighbouring ranks; 0 if nodes are unknown.

    ValueError with the reason if nodes cut the lines into unequal parts.
    """
    span, etp = plan.ep * plan.expert_tp_size, plan.expert_tp_size
    stage_ranks = of_stage_on_node(plan, ranks_per_node) if ranks_per_node else 0
    if ranks_per_node and not stage_ranks:
        raise ValueError(
            say(
                "with plan.order {order} {block} neighbouring ranks are of one stage and {block} x pp {pp} of a "
                "pipeline, and nodes of {ranks_per_node} cut them unevenly",
                order=plan.order,
                block=plan.block,
                pp=plan.pp,
                ranks_per_node=ranks_per_node,
            )
        )
    if stage_ranks == 0 or stage_ranks % span == 0:
        return min(stage_ranks, plan.ep)
    if span % stage_ranks or stage_ranks % etp:
        times = f"ep {plan.ep}" + (f" x expert_tp {etp}" if etp > 1 else "")
        nodes = say("nodes of {ranks}", ranks=ranks_per_node)
        if stage_ranks < ranks_per_node:
            nodes = say("{nodes}, each with {ranks} ranks of a stage,", nodes=nodes, ranks=stage_ranks)
        raise ValueError(
            say(
                "{degrees} = {span} neighbouring ranks exchange tokens, and {nodes} cut them unevenly",
                degrees=times,
                span=span,
                nodes=nodes,
            )
        )
    return int(stage_ranks // etp)


def layer_policies(plan: PlanSpec, layers: int, mtp_layers: int = 0) -> list[Policy]:
    """The recompute policy of each layer of the model, followed by the policies of the blocks of multi-token
    prediction, which are those of the last layer. A budget must be resolved before (memory/budget.py)."""
    of_layers = RECOMPUTES[plan.recompute].layers
    assert of_layers is not None, f"{plan.recompute} is not yet a choice of what to recompute"
    policies = of_layers(plan, layers)
    return policies + policies[-1:] * mtp_layers


def repeats_forwards(plan: PlanSpec, layers: int) -> bool:
    """True if stages or layers are recomputed from their inputs. A budget must be resolved before."""
    return RECOMPUTES[plan.recompute].by_stage or any(LAYER in policy for policy in layer_policies(plan, layers))
