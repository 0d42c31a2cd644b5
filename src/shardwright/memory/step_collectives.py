"""The traffic of one rank in a step: every collective and message, by kind and mesh axis, before it runs.

The counts equal those of a run's ledger: collectives of operators (layer_collectives.py), as often as the program runs
each pass and the policies of layers recompute it; messages between stages, from the program; collectives of replicas,
which are ZeRO's events replayed on sizes (zero_replay.py); and the sums at the end of a step. The step updates the
weights, and with delayed scales of fp8 it is not the first. The choices of gates are unknown: rows to experts are as
even as possible (sharding/routing_counts.py), and only the number of their collectives is exact. If experts choose
tokens, every token counts as chosen equally often.

Rajbhandari et al. 2020 (arXiv 1910.02054, section 7) state the traffic of replicas: with P the bytes of all parameters,
an all-reduce of P without ZeRO, a reduce-scatter and an all-gather of P in stages 1 and 2, and one more all-gather in
stage 3, some of which this engine leaves out (sharding/zero_events.py).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from shardwright.config.job import JobSpec
from shardwright.config.kept_results import kept_by_identity
from shardwright.config.model_shape import shape_of
from shardwright.config.plan import layer_policies, split_evenly
from shardwright.config.recompute_facts import RECOMPUTES
from shardwright.layers.query import policy_name
from shardwright.layers.recompute_cost import operators_again
from shardwright.memory.layer_collectives import (
    CollectiveCalls,
    OperatorCollectives,
    cast_collectives,
    num_float8_matrices,
    piece_collectives,
)
from shardwright.memory.rank_state import rank_state, shard_indices
from shardwright.memory.zero_replay import replay
from shardwright.schedule.action import RECV, SEND, Action, Kind
from shardwright.schedule.message_sizes import message_bytes
from shardwright.schedule.schedule import Program
from shardwright.sharding.groups import COPIES, DP, EP, ETP, PP, REPLICAS, SHARDS, TP, WORLD, axis_groups, ends
from shardwright.sharding.mesh import MeshShape
from shardwright.sharding.routing_counts import size_of_totals
from shardwright.sharding.stage_parameters import model_parameters

_FLOAT32, _NUMBER = 4, 8  # bytes; the latter of a float64 or an int64

PieceKind = tuple[str, str]  # (kind of piece, policy of recomputation)


@dataclass(frozen=True)
class Traffic:
    """Calls of one collective on one axis, and their bytes as in the ledger: bytes of the full tensor, which is the
    operand of an all-reduce or a reduce-scatter and the result of an all-gather."""

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
    """The number of times that all pieces of a kind run on a rank in the steps of a program: forwards, forwards that
    the program recomputes for a whole stage (`repeated`), and backwards."""

    forwards: int
    repeated: int
    backwards: int

    def again(self, share: float) -> int:
        """The number of recomputed forwards of an operator, if each backward recomputes a `share` of its forward."""
        return self.repeated + round(share * self.backwards)

    def __add__(self, other: "PassCounts") -> "PassCounts":
        return PassCounts(
            self.forwards + other.forwards, self.repeated + other.repeated, self.backwards + other.backwards
        )


def step_ledger(job: JobSpec, program: Program, rank: int) -> dict[str, Traffic]:
    """The ledger of a rank after it ran `program`. Keys have the form "collective axis"."""
    ledger: dict[str, Traffic] = {}
    for collective in step_collectives(job, program, rank):
        key = f"{collective.kind} {collective.axis}"
        before = ledger.get(key, Traffic(0, 0))
        ledger[key] = Traffic(before.calls + collective.calls, before.payload_bytes + collective.num_bytes)
    return dict(sorted(ledger.items()))


def ledger_table(traffic: Mapping[str, Traffic]) -> dict[str, dict[str, int]]:
    """Traffic in the form of a ledger's own table."""
    return {
        name: {"count": collective.calls, "bytes": collective.payload_bytes} for name, collective in traffic.items()
    }


def step_collectives(job: JobSpec, program: Program, rank: int) -> Iterator[PhaseCalls]:
    """The traffic of a rank while it runs `program`, by part of the step; for layers, by operator too."""
    place = MeshShape.of(job.plan).coordinates(rank)
    pp_rank = place["pp"]
    yield from _of_pieces(job, program, pp_rank, ep_index(job, rank))
    shards = shard_indices(job.plan, rank) if job.optimizer.facts.matrix_update == "orthogonal" else (0, 0)
    yield from rank_moves(job, program, pp_rank, place["tp"], shards)


def rank_moves(
    job: JobSpec, program: Program, pp_rank: int, tp_index: int = 0, shards: tuple[int, int] = (0, 0)
) -> list[PhaseCalls]:
    """The traffic of a rank without the collectives of its operators: messages, gradients and parameters, sums.
    `shards` are its `shard_indices`, on which the exchanges of Muon depend."""
    return [
        *_messages(job, program, pp_rank),
        *_of_state(job, program, pp_rank, tp_index, shards),
        *_end_of_step(job, program, pp_rank),
    ]


def ep_index(job: JobSpec, rank: int) -> int:
    """The index of a rank on its ep line."""
    lines = axis_groups(job.plan, EP).lines() if job.plan.ep > 1 else [[rank]]
    return next(line.index(rank) for line in lines if rank in line)


def pass_counts(job: JobSpec, program: Program, pp_rank: int) -> dict[PieceKind, PassCounts]:
    """The number of times that a pipeline rank runs the pieces of its stages, by their kind."""
    own_runs = _runs(program.ranks[pp_rank])
    runs_of_stages = {stage: own_runs.get(stage, Counter()) for stage in program.placement.stages_of(pp_rank)}
    plan = job.plan
    model = job.model
    names = [policy_name(policy) for policy in layer_policies(plan, model.layers, model.mtp_layers)]
    if RECOMPUTES[plan.recompute].by_stage:
        names = ["stage"] * model.num_blocks
    layers, passes_of = plan.stage_layers(model.layers), dict[PieceKind, PassCounts]()
    for stage, runs in runs_of_stages.items():
        first_layer = sum(layers[:stage])
        pieces = [("embedding", "none")] * (stage == 0) + [("head", "none")] * (stage == len(layers) - 1)
        pieces += [(_layer_kind(job, n), names[n]) for n in range(first_layer, first_layer + layers[stage])]
        counts = PassCounts(runs[Kind.FORWARD], runs[Kind.RECOMPUTE], runs[Kind.BACKWARD] + runs[Kind.INPUT_GRAD])
        counts_of_pieces = [(piece, counts) for piece in pieces]
        if stage == len(layers) - 1 and program.trains:  # further tokens are predicted only in passes that keep a graph
            counts_with_graph = PassCounts(counts.forwards - counts.repeated, counts.repeated, counts.backwards)
            for number in range(model.layers, model.num_blocks):
                counts_of_pieces += [
                    ((_layer_kind(job, number), names[number]), counts_with_graph),
                    (("mtp", "none"), counts_with_graph),
                ]
        for piece, count in counts_of_pieces:
            passes_of[piece] = passes_of.get(piece, PassCounts(0, 0, 0)) + count
    return passes_of


@partial(kept_by_identity, most=32)
def _runs(row: tuple[Action, ...]) -> dict[int, Counter[Kind]]:
    """The number of times that a rank's list computes each stage, by kind."""
    runs: dict[int, Counter[Kind]] = {}
    for part in (part for action in row for part in action.computes()):
        runs.setdefault(part.stage, Counter())[part.kind] += 1
    return runs


def again_shares(pieces: Sequence[OperatorCollectives], policy: str) -> dict[str, float]:
    """The share of each operator's forward that a backward recomputes; 0 under "stage", where the program does so."""
    recomputed = operators_again(tuple(piece.operator for piece in pieces), policy) if policy != "stage" else []
    return {piece.name: 0.0 for piece in pieces} | {operator.name: share for operator, share in recomputed}


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
    for collective in collectives if times else ():
        yield PhaseCalls(
            phase, collective.kind, collective.axis, times * collective.calls, times * collective.num_bytes
        )


def _messages(job: JobSpec, program: Program, pp_rank: int) -> Iterator[PhaseCalls]:
    """Messages of activations to the next stage and of gradients back, counted in the program."""
    kinds = Counter(action.kind for action in program.ranks[pp_rank])
    for name, actions in (("send", SEND), ("recv", RECV)):
        if calls := sum(kinds[kind] for kind in actions):
            yield PhaseCalls("between stages", name, "pp", calls, calls * message_bytes(job))


def _of_state(
    job: JobSpec, program: Program, pp_rank: int, tp_index: int, shards: tuple[int, int]
) -> Iterator[PhaseCalls]:
    """Collectives of gradients and parameters, over replicas and over tp, and those to cast weights to fp8."""
    states = rank_state(job, program, pp_rank, tp_index, shards)
    replayed = replay(job, program, pp_rank, states)
    for (kind, axis), num_bytes in sorted(replayed.moved_bytes.items()):
        phase = "parameters" if kind == "all_gather" and job.plan.zero else "gradients"
        phase = "update" if kind == "all_to_all_v" else phase
        yield PhaseCalls(phase, kind, axis, replayed.calls[kind, axis], num_bytes)
    for (_, region, of_experts), times in replayed.num_casts.items():
        yield from _times("forward", cast_collectives(job, _layer_kind(job, int(region)), of_experts), times)
    yield from _tied_table(job, program, pp_rank, tp_index)


def _tied_table(job: JobSpec, program: Program, pp_rank: int, tp_index: int) -> Iterator[PhaseCalls]:
    """The sum of the two gradients of a table that the last stage uses too, if its uses are on two ranks."""
    stages, last_stage = program.placement.stages_of(pp_rank), program.num_stages - 1
    if not job.model.shares_table or job.model.is_adapted or (0 in stages) == (last_stage in stages):
        return
    begin, end = split_evenly(job.model.vocab, job.plan.tp, tp_index)
    num_bytes = job.precision.gradient_bytes * (end - begin) * job.model.hidden
    yield PhaseCalls("gradients", "all_reduce", ends(job.plan, program.placement).axis, 1, num_bytes)


def _end_of_step(job: JobSpec, program: Program, pp_rank: int) -> Iterator[PhaseCalls]:
    """Sums of a few numbers over all ranks at the end of a step."""
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
        # The numbers of targets with a loss, and of tokens that are no padding.
        sums += [(axis_groups(plan, DP), losses + _NUMBER * has_router_losses)] * num_steps
    sums += [(axis_groups(plan, kind), losses) for kind in (PP, REPLICAS[False])] * num_steps  # the losses
    for groups, num_bytes in sums:
        if groups.size > 1:
            yield PhaseCalls("end of step", "all_reduce", groups.axis, 1, num_bytes)


def _parameters(job: JobSpec) -> int:
    """The number of parameters of the model, a tied one once. Each has one term in the norm of the gradient."""
    return len(model_parameters(job.model))


def _routing(job: JobSpec) -> list[int]:
    """Bytes of the totals of all routers."""
    layers = job.model.blocks_with_experts
    return [_NUMBER * len(layers) * size_of_totals(job.model.moe)] if layers else []


def _past_scales(job: JobSpec, stages: Collection[int], is_expert: bool) -> int:
    """Bytes of the largest values of a step, from which delayed scales of the next steps are computed: three for each
    common matrix, or each of experts'."""
    if not job.precision.has_delayed_scales:
        return 0
    counts = job.plan.stage_layers(job.model.layers)
    layers = [n for stage in stages for n in range(sum(counts[:stage]), sum(counts[: stage + 1]))]
    layers += range(job.model.layers, job.model.num_blocks) if len(counts) - 1 in stages else ()
    return 3 * _FLOAT32 * sum(num_float8_matrices(job, _layer_kind(job, n), is_expert) for n in layers)


def _layer_kind(job: JobSpec, layer: int) -> str:
    return shape_of(job.model).kind(layer)
