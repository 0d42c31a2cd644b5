"""All that one rank sends and receives in a step: every collective and message, by kind and mesh axis, before it runs.

It is what the ledger of a run has, exactly: what operators exchange (layer_collectives.py), as often as the program
runs each pass and the policies of layers run it again; messages between stages, which the program has; what replicas
exchange, which is ZeRO's events played on sizes (zero_replay.py); and the sums that a step ends with. It is of a step
that updates the weights, not of one that an overflow leaves out, and of delayed scales of fp8 one with a past. What a
gate chooses is not known: rows to experts are as even as they can be (sharding/even_routing.py), and only how often
they travel is exact. Where experts choose, every token is taken for having as many of them.

Rajbhandari et al. 2020 (arXiv 1910.02054, section 7) say what replicas move: with P the bytes of all parameters, an
all-reduce of P without ZeRO, a reduce-scatter and an all-gather of P in stages 1 and 2, and in stage 3 one more
all-gather, of which the engine here leaves out some (sharding/zero_events.py).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwright.account.layer_collectives import (
    CollectiveCalls,
    OperatorCollectives,
    cast_collectives,
    num_float8_matrices,
    piece_collectives,
)
from shardwright.account.rank_state import rank_state, shard_indices
from shardwright.account.zero_replay import replay
from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.config.plan import layer_policies, split_evenly
from shardwright.schedule.action import RECV, SEND, Kind
from shardwright.schedule.message_sizes import message_bytes
from shardwright.schedule.schedule import Program
from shardwright.sharding.groups import COPIES, DP, EP, ETP, PP, REPLICAS, SHARDS, TP, WORLD, axis_groups, ends
from shardwright.sharding.mesh import MeshShape
from shardwright.sharding.router_totals import size_of_totals
from shardwright.sharding.stage_parameters import model_parameters
from shardwright.workload.query import policy_name
from shardwright.workload.recompute_cost import operators_again

_FLOAT32, _NUMBER = 4, 8  # bytes; of a float64 or an int64

PieceKind = tuple[str, str]  # a kind of piece, and what it recomputes


@dataclass(frozen=True)
class Traffic:
    """Calls of one collective on one axis, and their bytes as the ledger counts them: those of the full tensor, the
    operand of an all-reduce or a reduce-scatter, the result of an all-gather."""

    calls: int
    payload_bytes: int


@dataclass(frozen=True)
class PhaseCalls:
    """Calls of one collective on one axis, in one part of a step, and their bytes."""

    phase: str
    kind: str
    axis: str
    calls: int
    num_bytes: int


@dataclass(frozen=True)
class PassCounts:
    """How often pieces of a kind run on a rank in the steps of a program, all of them for all of their microbatches:
    forwards, those of them that a program runs once more for a whole stage, and backwards."""

    forwards: int
    repeated: int
    backwards: int

    def again(self, share: float) -> int:
        """Forwards that are computed again of an operator of which a backward does so with a `share`."""
        return self.repeated + round(share * self.backwards)

    def __add__(self, other: "PassCounts") -> "PassCounts":
        return PassCounts(
            self.forwards + other.forwards, self.repeated + other.repeated, self.backwards + other.backwards
        )


def step_ledger(job: JobSpec, program: Program, rank: int) -> dict[str, Traffic]:
    """The ledger of a rank after it ran `program`, by "collective axis"."""
    ledger: dict[str, Traffic] = {}
    for moved in step_collectives(job, program, rank):
        key = f"{moved.kind} {moved.axis}"
        before = ledger.get(key, Traffic(0, 0))
        ledger[key] = Traffic(before.calls + moved.calls, before.payload_bytes + moved.num_bytes)
    return dict(sorted(ledger.items()))


def ledger_table(traffic: Mapping[str, Traffic]) -> dict[str, dict[str, int]]:
    """Traffic in the form of a ledger's own table."""
    return {name: {"count": moved.calls, "bytes": moved.payload_bytes} for name, moved in traffic.items()}


def step_collectives(job: JobSpec, program: Program, rank: int) -> Iterator[PhaseCalls]:
    """All that a rank moves while it runs `program`, by part of the step; one of layers for each operator."""
    place = MeshShape.of(job.plan).coordinates(rank)
    pp_rank = place["pp"]
    yield from _of_pieces(job, program, pp_rank, ep_index(job, rank))
    shards = shard_indices(job.plan, rank) if job.optimizer.facts.matrix_update == "orthogonal" else (0, 0)
    yield from rank_moves(job, program, pp_rank, place["tp"], shards)


def rank_moves(
    job: JobSpec, program: Program, pp_rank: int, tp_index: int = 0, shards: tuple[int, int] = (0, 0)
) -> list[PhaseCalls]:
    """The traffic of a rank besides the collectives of its operators: messages, gradients and parameters, sums. What
    Muon exchanges is by the rank's places among those that share shards."""
    return [
        *_messages(job, program, pp_rank),
        *_of_state(job, program, pp_rank, tp_index, shards),
        *_end_of_step(job, program, pp_rank),
    ]


def ep_index(job: JobSpec, rank: int) -> int:
    """The place of a rank on its ep line."""
    lines = axis_groups(job.plan, EP).lines() if job.plan.ep > 1 else [[rank]]
    return next(line.index(rank) for line in lines if rank in line)


def pass_counts(job: JobSpec, program: Program, pp_rank: int) -> dict[PieceKind, PassCounts]:
    """How often a pipeline rank runs pieces of each kind; those of stages that it holds."""
    of_stages: dict[int, Counter[Kind]] = {stage: Counter() for stage in program.placement.stages_of(pp_rank)}
    for part in (part for action in program.ranks[pp_rank] for part in action.computes()):
        of_stages[part.stage][part.kind] += 1
    plan = job.plan
    model = job.model
    names = [policy_name(policy) for policy in layer_policies(plan, model.layers, model.mtp_layers)]
    if plan.recompute == "stage":
        names = ["stage"] * model.num_blocks
    layers, passes_of = plan.stage_layers(model.layers), dict[PieceKind, PassCounts]()
    for stage, runs in of_stages.items():
        first = sum(layers[:stage])
        pieces = [("embedding", "none")] * (stage == 0) + [("head", "none")] * (stage == len(layers) - 1)
        pieces += [(_layer_kind(job, n), names[n]) for n in range(first, first + layers[stage])]
        counts = PassCounts(runs[Kind.FORWARD], runs[Kind.RECOMPUTE], runs[Kind.BACKWARD] + runs[Kind.INPUT_GRAD])
        of_pieces = [(piece, counts) for piece in pieces]
        if stage == len(layers) - 1 and program.trains:  # further tokens are for passes that keep a graph
            once = PassCounts(counts.forwards - counts.repeated, counts.repeated, counts.backwards)
            for number in range(model.layers, model.num_blocks):
                of_pieces += [((_layer_kind(job, number), names[number]), once), (("mtp", "none"), once)]
        for piece, count in of_pieces:
            passes_of[piece] = passes_of.get(piece, PassCounts(0, 0, 0)) + count
    return passes_of


def again_shares(pieces: Sequence[OperatorCollectives], policy: str) -> dict[str, float]:
    """The share of each operator's forward that a backward computes again; under "stage" the program says when."""
    again = operators_again(tuple(piece.of for piece in pieces), policy) if policy != "stage" else []
    return {piece.name: 0.0 for piece in pieces} | {operator.name: share for operator, share in again}


def _of_pieces(job: JobSpec, program: Program, pp_rank: int, ep_index: int) -> Iterator[PhaseCalls]:
    for (kind, policy), counts in pass_counts(job, program, pp_rank).items():
        pieces = piece_collectives(job, kind, ep_index)
        shares = again_shares(pieces, policy)
        for piece in pieces:
            yield from _times("forward", piece.forward, counts.forwards)
            yield from _times("forward", piece.with_graph, counts.backwards)
            yield from _times("computed again", piece.forward, counts.again(shares[piece.name]))
            yield from _times("backward", piece.backward, counts.backwards)


def _times(phase: str, collectives: Iterable[CollectiveCalls], times: int) -> Iterator[PhaseCalls]:
    for one in collectives if times else ():
        yield PhaseCalls(phase, one.kind, one.axis, times * one.calls, times * one.num_bytes)


def _messages(job: JobSpec, program: Program, pp_rank: int) -> Iterator[PhaseCalls]:
    """Activations to the next stage and gradients back, as the program has them."""
    kinds = Counter(action.kind for action in program.ranks[pp_rank])
    for name, among in (("send", SEND), ("recv", RECV)):
        if calls := sum(kinds[kind] for kind in among):
            yield PhaseCalls("between stages", name, "pp", calls, calls * message_bytes(job))


def _of_state(
    job: JobSpec, program: Program, pp_rank: int, tp_index: int, shards: tuple[int, int]
) -> Iterator[PhaseCalls]:
    """Gradients and parameters, over replicas and over tp; and what of weights goes with their casts to fp8."""
    held = rank_state(job, program, pp_rank, tp_index, shards)
    replayed = replay(job, program, pp_rank, held)
    for (kind, axis), num_bytes in sorted(replayed.moved_bytes.items()):
        phase = "parameters" if kind == "all_gather" and job.plan.zero else "gradients"
        phase = "update" if kind == "all_to_all_v" else phase
        yield PhaseCalls(phase, kind, axis, replayed.calls[kind, axis], num_bytes)
    for (_, region, of_experts), times in replayed.num_casts.items():
        yield from _times("forward", cast_collectives(job, _layer_kind(job, int(region)), of_experts), times)
    yield from _tied_table(job, program, pp_rank, tp_index)


def _tied_table(job: JobSpec, program: Program, pp_rank: int, tp_index: int) -> Iterator[PhaseCalls]:
    """The two gradients of a table that the last stage uses too, if its uses are on two ranks."""
    stages, last = program.placement.stages_of(pp_rank), program.num_stages - 1
    if not job.model.shares_table or (0 in stages) == (last in stages):
        return
    first, end = split_evenly(job.model.vocab, job.plan.tp, tp_index)
    num_bytes = job.precision.gradient_bytes * (end - first) * job.model.hidden
    yield PhaseCalls("gradients", "all_reduce", ends(job.plan, program.placement).axis, 1, num_bytes)


def _end_of_step(job: JobSpec, program: Program, pp_rank: int) -> Iterator[PhaseCalls]:
    """Sums that every rank knows when a step is over, of a few numbers."""
    plan, stages = job.plan, program.placement.stages_of(pp_rank)
    drains = program.weights == "current"
    num_steps = program.num_microbatches // job.num_microbatches
    world = [_parameters(job) * _NUMBER, *_routing(job)] if drains else []  # the norm of all gradients
    sums = [(axis_groups(plan, WORLD), num_bytes) for num_bytes in world]
    for is_expert, tensor_parallel in ((False, TP), (True, ETP)):
        if drains and (scales := _past_scales(job, stages, is_expert)):
            sums += [
                (axis_groups(plan, kind), scales) for kind in (tensor_parallel, SHARDS[is_expert], COPIES[is_expert])
            ]
    losses = _NUMBER * (1 + job.model.mtp_layers)
    has_router_losses = job.model.has_router_losses
    if job.data.separate_documents:
        # How many targets have a loss, and tokens are real.
        sums += [(axis_groups(plan, DP), losses + _NUMBER * has_router_losses)] * num_steps
    sums += [(axis_groups(plan, kind), losses) for kind in (PP, REPLICAS[False])] * num_steps  # the losses
    for groups, num_bytes in sums:
        if groups.size > 1:
            yield PhaseCalls("end of step", "all_reduce", groups.axis, 1, num_bytes)


def _parameters(job: JobSpec) -> int:
    """Parameters of the model, a tied one once, each of which gives one number to the norm of the gradient."""
    return len(model_parameters(job.model))


def _routing(job: JobSpec) -> list[int]:
    """Bytes of what all routers saw."""
    layers = job.model.blocks_with_experts
    return [_NUMBER * len(layers) * size_of_totals(job.model.moe)] if layers else []


def _past_scales(job: JobSpec, stages: Collection[int], is_expert: bool) -> int:
    """Bytes of the largest values of a step that delayed scales of the next ones come from, three of each matrix, of
    those that all tokens meet or of experts'."""
    if job.precision.float8 != "delayed":
        return 0
    counts = job.plan.stage_layers(job.model.layers)
    layers = [n for stage in stages for n in range(sum(counts[:stage]), sum(counts[: stage + 1]))]
    layers += range(job.model.layers, job.model.num_blocks) if len(counts) - 1 in stages else ()
    return 3 * _FLOAT32 * sum(num_float8_matrices(job, _layer_kind(job, n), is_expert) for n in layers)


def _layer_kind(job: JobSpec, layer: int) -> str:
    return shape_of(job.model).kind(layer)
