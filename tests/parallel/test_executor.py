"""The executor does what the program says, and the bytes it moves are those of a table derived by hand."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.parameter import placed_parameters
from shardwright.schedule.action import RECV, SEND, Kind
from shardwright.schedule.job_program import job_program
from shardwright.schedule.lowering.overlap_pairs import sends_of_parts, split_pairs
from shardwright.schedule.message_sizes import job_sizes
from shardwright.train.build import build
from shardwright.train.train_step import evaluate, microbatches, train_step
from support.cases import made_up_tokens, small_job
from support.programs import training_program
from support.ranks import leaves_nothing, run_on_mesh


@leaves_nothing
def performed_and_counted(mesh: Mesh, job: JobSpec) -> tuple[list[str], dict[str, dict[str, int]]]:
    """The second step of a rank: what it did, and what it moved."""
    replica = build(job, mesh)
    share = job.batch.global_batch_size // job.plan.dp
    for step in range(2):
        mesh.ledger.clear()
        train_step(replica, step, made_up_tokens(job, step)[mesh.dp.index * share :][:share])
    return [str(entry.action) for entry in replica.executor.performed], mesh.ledger.table()


@pytest.mark.parametrize("schedule", ["sequential", "gpipe", "1f1b"])
def test_order_performed_is_the_order_planned(schedule: str) -> None:
    job = small_job(pp=4, schedule=schedule, batch=6)
    program = training_program(schedule, 4, 6)
    for rank, (performed, _) in enumerate(run_on_mesh(job, performed_and_counted, job)):
        assert performed == [str(action) for action in program.ranks[rank]]


LAYERS, HIDDEN, SEQUENCE, VOCAB, FFN, HEAD_DIM, HEADS, KV_HEADS = 4, 32, 16, 61, 48, 4, 8, 4
BATCH, MICROBATCHES, FLOAT = 2, 2, 4
TOKENS = BATCH * SEQUENCE
HIDDEN_STATES = TOKENS * HIDDEN * FLOAT  # bytes of [S, B, H]: what one tensor-parallel collective is about


def parameters_of(stage: int, tp_index: int) -> tuple[int, int, int]:
    """(elements sharded over tp, elements of norms, number of tensors) of a rank with half of the layers."""
    qkv = (HEADS + 2 * KV_HEADS) * HEAD_DIM * HIDDEN // 2
    layer = qkv + HIDDEN * HEADS * HEAD_DIM // 2 + 3 * HIDDEN * FFN // 2
    vocabulary_rows = 31 if tp_index == 0 else 30  # of 61
    norms = 2 * LAYERS // 2 + stage  # two a layer, and the last one at the end
    return LAYERS // 2 * layer + vocabulary_rows * HIDDEN, norms * HIDDEN, 4 * LAYERS // 2 + 1 + norms


def expected_table(rank: int, sequence_parallel: bool) -> dict[str, dict[str, int]]:
    """dp 2 x tp 2 x pp 2, two layers a stage, two microbatches of two sequences, one bucket."""
    stage, tp_index = rank // 4, rank % 2
    sharded, norms, _ = parameters_of(stage, tp_index)
    num_tensors = sum(parameters_of(s, 0)[2] for s in (0, 1))
    layers = LAYERS // 2
    table: dict[tuple[str, str], list[int]] = {}

    def add(kind: str, axis: str, num_bytes: int, times: int = 1) -> None:
        entry = table.setdefault((kind, axis), [0, 0])
        entry[0] += times
        entry[1] += times * num_bytes

    for _ in range(MICROBATCHES):
        if sequence_parallel:
            # A column linear gathers its input; backward it gathers it again and scatters the input gradient. A row
            # linear scatters its output; backward it gathers the gradient. There are two of each in a layer.
            add("all_gather", "tp", HIDDEN_STATES, layers * 2 * 3)
            add("reduce_scatter", "tp", HIDDEN_STATES, layers * 2 * 2)
            if stage == 0:  # the embedding scatters, and gathers its gradient
                add("reduce_scatter", "tp", HIDDEN_STATES)
                add("all_gather", "tp", HIDDEN_STATES)
            else:  # the head gathers in the backward alone
                add("all_gather", "tp", HIDDEN_STATES)
                add("reduce_scatter", "tp", HIDDEN_STATES)
        else:
            # One all-reduce forward (row) and one backward (column) for each attention and each MLP.
            add("all_reduce", "tp", HIDDEN_STATES, layers * 2 * 2)
            add("all_reduce", "tp", HIDDEN_STATES)  # the embedding's forward, or the head's backward
        if stage == 1:  # the loss: the largest logit of each token, then its target's logit and its sum
            add("all_reduce", "tp", TOKENS * FLOAT)
            add("all_reduce", "tp", 2 * TOKENS * FLOAT)
        between = HIDDEN_STATES // 2 if sequence_parallel else HIDDEN_STATES
        add("send", "pp", between)
        add("recv", "pp", between)
    if sequence_parallel:  # norms see a part of the tokens each: first summed over tp
        add("all_reduce", "tp", norms * FLOAT)
    add("all_reduce", "dp", (sharded + norms) * FLOAT)
    add("all_reduce", "world", num_tensors * 8)  # the squared norm of each tensor, float64
    for axis in ("pp", "dp"):  # the loss, float64
        add("all_reduce", axis, 8)
    return {f"{k} {a}": {"count": c, "bytes": b} for (k, a), (c, b) in sorted(table.items())}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_bytes_counted_are_bytes_derived(sequence_parallel: bool) -> None:
    job = small_job(
        layers=4,
        dp=2,
        tp=2,
        pp=2,
        sequence_parallel=sequence_parallel,
        microbatch_size=BATCH,
        batch=2 * BATCH * MICROBATCHES,
    )
    for rank, (_, table) in enumerate(run_on_mesh(job, performed_and_counted, job)):
        assert table == expected_table(rank, sequence_parallel)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("schedule", "plan"),
    [
        ("1f1b", {"tp": 2, "sequence_parallel": True, "dp": 2}),
        ("1f1b", {"dp": 2, "recompute": "stage"}),
        ("interleaved-1f1b", {"virtual_stages": 2, "tp": 2, "sequence_parallel": True}),
        ("zb-v", {"tp": 2, "dp": 2}),
        ("dualpipev", {"tp": 2, "sequence_parallel": True, "recompute": "stage"}),
        ("dualpipe", {"dp": 2}),
    ],
)
def test_bytes_planned_are_bytes_counted(schedule: str, plan: dict[str, Any]) -> None:
    """Messages exactly; and of the sums over dp all but that of the loss, which is no part of the program."""
    kind = "gpt-tied" if schedule == "zb-v" else "llama"
    job = small_job(kind, pp=2, schedule=schedule, batch=4 * 2 * plan.get("dp", 1), microbatch_size=2, **plan)
    program = job_program(job)
    for rank, (_, table) in enumerate(run_on_mesh(job, performed_and_counted, job)):
        position, tp_index = rank // (job.plan.dp * job.plan.tp), rank % job.plan.tp
        mine = replace(program, sizes=job_sizes(job, program.placement, tp_index))

        def planned(kinds: frozenset[Kind], mine: Any = mine, position: int = position) -> int:
            return sum(mine.num_bytes(action) for action in mine.ranks[position] if action.kind in kinds)

        def counted(entry: str, table: Any = table) -> int:
            return table.get(entry, {"bytes": 0})["bytes"]

        assert counted("send pp") == planned(SEND) > 0
        assert counted("recv pp") == planned(RECV) > 0
        loss = 8 if job.plan.dp > 1 else 0
        assert counted("all_reduce dp") - loss == planned(frozenset({Kind.REDUCE}))


def test_tied_table_is_summed_over_the_ends_alone() -> None:
    job = small_job("gpt-tied", pp=3, batch=2)
    tables = [table for _, table in run_on_mesh(job, performed_and_counted, job)]
    table_bytes = VOCAB * HIDDEN * FLOAT
    assert [t.get("all_reduce ends") for t in tables] == [
        {"count": 1, "bytes": table_bytes},
        None,
        {"count": 1, "bytes": table_bytes},
    ]


def accumulate(mesh: Mesh, job: JobSpec) -> tuple[int, int]:
    """Gradient reductions over dp in a step of this many microbatches, and in an evaluation."""
    replica = build(job, mesh)
    tokens = made_up_tokens(job, 0)[: job.batch.global_batch_size // 2]
    train_step(replica, 0, tokens)
    in_step = mesh.ledger.tallies["all_reduce", "dp"].count
    mesh.ledger.clear()
    evaluate(replica, tokens)
    return in_step, mesh.ledger.tallies["all_reduce", "dp"].count


def test_nothing_is_reduced_while_microbatches_accumulate() -> None:
    once, four_times = (run_on_mesh(job, accumulate, job) for job in (small_job(dp=2, batch=n) for n in (2, 8)))
    assert once == four_times == [(2, 1)] * 2  # one bucket and the loss; the loss alone


def losses_and_gradients(mesh: Mesh, job: JobSpec) -> list[tuple[list[str], list[torch.Tensor], list[bool]]]:
    """The actions and results of a step with pairs, and of one with the same pairs taken apart; and of each send of a
    pair's part, whether it began before the pair ended."""
    replica = build(job, mesh)
    tokens = microbatches(made_up_tokens(job, 0), job.plan.microbatch_size)
    outcomes = []
    for program in (replica.program, split_pairs(replica.program)):
        for shards in replica.shards.values():
            shards.clear_gradients()
        losses = replica.executor.run(program, tokens, lambda _: replica.finish_gradients())
        parameters = [p for stage in replica.stages.values() for p in placed_parameters(stage).values()]
        bits = [losses[i] for i in sorted(losses)] + [p.gradient.clone() for p in parameters]
        performed = {entry.action: entry for entry in replica.executor.performed}
        pair_of = {part: performed[pair] for pair in performed for part in pair.parts}
        sends = sends_of_parts(program.ranks[mesh.pp.index])
        early = [performed[send].start_s < pair_of[part].end_s for part, send in sends.items()]
        outcomes.append(([str(entry.action) for entry in replica.executor.performed], bits, early))
    return outcomes


def test_pairs_give_the_bits_of_their_parts_in_turn() -> None:
    job = small_job(pp=2, tp=2, schedule="dualpipev", batch=6)
    programs = job_program(job), split_pairs(job_program(job))
    for rank, outcomes in enumerate(run_on_mesh(job, losses_and_gradients, job)):
        for program, (performed, _, _) in zip(programs, outcomes, strict=True):
            assert performed == [str(action) for action in program.ranks[rank // 2]]
        (_, side_by_side, early), (_, in_turn, _) = outcomes
        assert early and all(early)
        assert all(torch.equal(one, other) for one, other in zip(side_by_side, in_turn, strict=True))
