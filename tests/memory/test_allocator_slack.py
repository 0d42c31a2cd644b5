"""Memory that torch's allocator holds beside what it gave out, against a loop over the launches that are queued."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from shardwright.config.model_shape import ModelShape
from shardwright.config.section_shapes import ExpertShape
from shardwright.config.software import SoftwareSpec, software_of
from shardwright.cost.calibration import shipped, software_under
from shardwright.layers.chains import chains
from shardwright.layers.query import PlanGrid, Run
from shardwright.memory.allocator_slack import (
    LAUNCH_QUEUE,
    StreamBlocks,
    copy_bytes,
    cut_blocks,
    largest_block,
    pending_blocks,
    stream_blocks,
    update_bytes,
)
from shardwright.memory.fit_chance import SPREAD, UNNAMED_SPREAD, fit_chance, most_needed_bytes
from shardwright.memory.gathered_weights import gathered_bytes
from shardwright.memory.rank_estimate import peak_memory, rank_memory

SHAPE = ModelShape(
    layers=8, hidden=1024, heads=8, kv_heads=8, head_dim=128, ffn=4096, gated=True, vocab=32768, sequence=4096
)
GRID = PlanGrid(dp=1, tp=4, pp=1, microbatch=2, global_batch=16, sequence_parallel=True, zero=0)
NANOTRON = software_of("nanotron")
WHOLE = 2 * 4096 * 1024 * 2  # bytes of the residual stream of a microbatch


def run(grid: PlanGrid, software: str = "nanotron", shape: ModelShape = SHAPE) -> Run:
    return Run(
        shape,
        grid,
        device="h100-sxm",
        software=software,
        devices_per_node=8,
        node_bytes_per_s=450e9,
        network_bytes_per_s=50e9,
    )


def queued_bytes(software: SoftwareSpec, num_layers: int, num_passes: int) -> float:
    """Most bytes of blocks in the queue at the end of a forward, launch by launch: each layer of a forward and of a
    backward frees 2 blocks that a reduce-scatter reads."""
    queue: deque[int] = deque(maxlen=LAUNCH_QUEUE)
    most = 0
    for number in range(num_passes):
        launches = int(software.queued[number % 2])
        for _ in range(num_layers):
            queue.extend([WHOLE] * 2 + [0] * (launches - 2))
        most = max(most, sum(queue)) if number % 2 == 0 else most
    return float(most)


@pytest.mark.parametrize("num_layers", [4, 16, 24, 32, 48])
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_blocks_in_the_queue_are_those_of_a_loop_over_launches(num_layers: int, num_microbatches: int) -> None:
    grid = replace(GRID, global_batch=2 * num_microbatches).as_arrays()
    layers = [(np.array([num_layers]), StreamBlocks(2.0 * WHOLE, 2.0 * WHOLE))]
    pending = pending_blocks(NANOTRON, grid, np.array([1]), layers)
    looped = queued_bytes(NANOTRON, num_layers, 2 * num_microbatches - 1)
    assert np.asarray(pending.expected).item() == pytest.approx(
        looped, abs=4 * WHOLE
    )  # a layer at each end of the queue
    assert np.asarray(pending.most).item() == np.asarray(pending.expected).item()


@pytest.mark.parametrize(("alive", "followed"), [(1, 0), (2, 0), (4, 2), (8, 6)])
def test_a_pipeline_queues_the_forwards_that_follow_another(alive: int, followed: int) -> None:
    """A forward of 3 layers launches 3 x 29; all of those that follow one another are in the queue."""
    grid = replace(GRID, pp=8).as_arrays()
    layers = [(np.array([3]), StreamBlocks(2.0 * WHOLE, 2.0 * WHOLE))]
    pending = pending_blocks(NANOTRON, grid, np.array([alive]), layers)
    assert np.asarray(pending.expected).item() == 3 * followed * 2 * WHOLE
    assert np.asarray(pending.most).item() == 3 * max(1, followed) * 2 * WHOLE


def test_the_sums_over_tp_are_the_blocks_that_a_stream_holds() -> None:
    chain = chains(SHAPE, GRID, NANOTRON)["dense"]
    blocks = stream_blocks(chain, NANOTRON)
    assert (blocks.forward, blocks.backward) == (2 * WHOLE, 2 * WHOLE)  # behind attention and MLP; before them
    assert largest_block(chain) == 2 * 8192 * 2 * 4096 / 4  # both halves of the gated activation
    alone = stream_blocks(chains(SHAPE, replace(GRID, tp=1, sequence_parallel=False), NANOTRON)["dense"], NANOTRON)
    assert (alone.forward, alone.backward) == (0, 0)


def test_what_tp_ranks_gather_is_recorded_where_it_is_a_new_tensor() -> None:
    """A layer of Megatron gathers before two products forward; backward their inputs again, and two gradients."""
    core = software_of("megatron-core-2024")
    blocks = stream_blocks(chains(SHAPE, GRID, core)["dense"], core)
    assert (blocks.forward, blocks.backward) == ((2 + 2) * WHOLE, (2 + 4) * WHOLE)
    whole = replace(GRID, sequence_parallel=False)  # sums alone
    blocks = stream_blocks(chains(SHAPE, whole, core)["dense"], core)
    assert (blocks.forward, blocks.backward) == (2 * WHOLE, 2 * WHOLE)


@pytest.mark.parametrize(("alive", "virtual"), [(1, 1), (8, 1), (8, 2)])
def test_a_host_that_waits_at_messages_is_ahead_by_one_pass(alive: int, virtual: int) -> None:
    """Of 6 layers in a pipeline those of one stage, however many forwards follow one another."""
    core = software_of("megatron-core-2024")
    grid = replace(GRID, pp=8, virtual=virtual).as_arrays()
    layers = [(np.array([6]), StreamBlocks(4.0 * WHOLE, 6.0 * WHOLE))]
    pending = pending_blocks(core, grid, np.array([alive]), layers)
    assert np.asarray(pending.expected).item() == 6 / virtual * 4 * WHOLE
    assert np.asarray(pending.most).item() == 6 * 4 * WHOLE


@pytest.mark.parametrize(("tp", "held"), [(4, 4), (1, 0)])
def test_blocks_that_a_stream_holds_and_idle_ones_are_not_added(tp: int, held: int) -> None:
    """The share that lies idle was measured with all causes in it, so the larger of both counts: of one microbatch over
    tp 4 the blocks of 8 layers, without tp 12 % of what a step allocates."""
    grid = replace(GRID, tp=tp, sequence_parallel=tp > 1, global_batch=2)
    memory, constants = peak_memory(run(grid, "megatron-core-2024"), shipped()), shipped()
    step_bytes = float(memory.activations + memory.working + memory.buffers)
    blocks = constants["common.memory_lost"] * step_bytes + 8 * held * WHOLE
    assert (blocks > 0.12 * step_bytes) == (held > 0)
    assert float(memory.slack) == pytest.approx(max(0.12 * step_bytes, blocks))


@pytest.mark.parametrize(
    ("software", "norm_bytes", "key_shares"), [("megatron-legacy", 2, 0.5), ("megatron-legacy-2024", 6, 2)]
)
def test_single_operators_keep_more_of_a_norm_and_of_keys(software: str, norm_bytes: int, key_shares: float) -> None:
    """By element of the residual stream, with keys and values of a quarter of the heads: a norm keeps its input, or its
    float32 copy and what meets the weight; attention keeps two quarters of keys and values, or copies for all heads."""
    shape = replace(SHAPE, kv_heads=2)
    grid = replace(GRID, tp=1, sequence_parallel=False)
    chain = {operator.name: operator for operator in chains(shape, grid, software_of(software))["dense"]}
    elements = WHOLE / 2
    assert chain["attention norm"].kept == norm_bytes * elements
    assert chain["qkv"].kept == 2 * (1 + key_shares) * elements
    gpt = replace(shape, layer_norm=True)
    norm = next(o for o in chains(gpt, grid, software_of(software))["dense"] if o.name == "attention norm")
    assert norm.kept == 2 * elements  # apex's kernel keeps its input


@pytest.mark.parametrize(
    ("largest", "zero", "dp", "copies"),
    [(0, 1, 4, 2), (600, 1, 4, 1), (400, 1, 4, 2), (2000, 1, 4, 0), (0, 0, 4, 0), (0, 1, 1, 0)],
)
def test_copies_of_a_gather_need_blocks_of_their_own_where_none_is_large_enough(
    largest: int, zero: int, dp: int, copies: int
) -> None:
    """1,000 elements are a copy of 2,000 bytes, and over 4 ranks four of 500."""
    grid = replace(GRID, zero=zero, dp=dp, global_batch=64).as_arrays()
    num_bytes = copy_bytes(grid, (np.array([1000]),), float(largest))
    assert np.all(num_bytes == 2000 * copies)


class CachingAllocator:
    """torch's, for large blocks: a request takes the smallest free piece that is large enough, whose rest stays free;
    free pieces of one block join."""

    def __init__(self) -> None:
        self.blocks: list[list[list[int]]] = []  # of pieces, each with its size and whether it is in use

    @property
    def reserved(self) -> int:
        return sum(size for block in self.blocks for size, _ in block)

    def take(self, size: int) -> list[int]:
        fitting = [(piece, block) for block in self.blocks for piece in block if not piece[1] and piece[0] >= size]
        if not fitting:
            self.blocks.append([[size, 1]])
            return self.blocks[-1][0]
        piece, block = min(fitting, key=lambda pair: pair[0][0])
        if piece[0] > size:
            block.insert(next(i for i, one in enumerate(block) if one is piece) + 1, [piece[0] - size, 0])
        piece[:] = [size, 1]
        return piece

    def give(self, pieces: list[list[int]]) -> None:
        for piece in pieces:
            piece[1] = 0
        for block in self.blocks:
            for i in range(len(block) - 1, 0, -1):
                if not block[i][1] and not block[i - 1][1]:
                    block[i - 1][0] += block.pop(i)[0]


def reserved_of_a_step(*, fresh_gradients: bool, num_microbatches: int = 3) -> int:
    """The loss takes 3 blocks of 80; then each of 8 layers takes 6 of 5, and has a gradient of 20."""
    allocator = CachingAllocator()
    if not fresh_gradients:
        for _ in range(8):
            allocator.take(20)
    for number in range(num_microbatches):
        allocator.give([allocator.take(80) for _ in range(3)])
        for _ in range(8):
            pieces = [allocator.take(5) for _ in range(3)]
            if fresh_gradients and number == 0:
                allocator.take(20)
            allocator.give(pieces + [allocator.take(5) for _ in range(3)])
    return allocator.reserved


def test_gradients_cut_the_blocks_of_a_loss_so_that_the_next_one_needs_new_ones() -> None:
    lasting, fresh = (reserved_of_a_step(fresh_gradients=fresh) for fresh in (False, True))
    assert lasting == 8 * 20 + 240  # layers have the blocks of the loss
    aleph, grid = software_of("aleph-flash2"), replace(GRID, global_batch=6)
    expected = cut_blocks(aleph, grid, 30.0, 240.0)
    assert expected == 30 and lasting + expected <= fresh <= lasting + expected + 80  # a block of the loss more
    assert reserved_of_a_step(fresh_gradients=True, num_microbatches=1) == 240  # they have room in them
    assert cut_blocks(aleph, replace(GRID, global_batch=2), 30.0, 240.0) == 0
    assert cut_blocks(software_of("megatron-core"), grid, 30.0, 240.0) == 0
    whole, half = (peak_memory(run(replace(GRID, global_batch=n), "aleph-torch"), shipped()) for n in (2, 4))
    assert half.total == whole.total and half.process > whole.process


@pytest.mark.parametrize(("zero", "largest", "copies"), [(1, 0, 2), (1, 600, 0), (1, 400, 2), (0, 0, 0), (3, 0, 0)])
def test_the_update_of_deepspeed_has_blocks_of_its_own(zero: int, largest: int, copies: int) -> None:
    """Of 1,000 elements over 4 ranks: two flat copies of 500 bytes a rank."""
    grid = replace(GRID, zero=zero, dp=4, global_batch=64).as_arrays()
    blocks = update_bytes(software_of("megatron-deepspeed"), grid, (np.array([1000]),), float(largest))
    bucket = 954 * 2**20 * (zero == 1)
    assert np.all(blocks.needed == bucket) and np.all(blocks.reserved == bucket + copies * 500)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_zero_3_of_deepspeed_updates_one_group_after_another(precision: str) -> None:
    """Of 12e9 elements over 4 ranks it makes copies of 1e9 at once, in 16 bits and in float32; of 2e9 over 4 of all.
    They stand beside the gradients, so a plan needs them where a step's activations are fewer bytes."""
    grid = replace(GRID, zero=3, dp=4, global_batch=64, precision=precision)
    deepspeed = software_under(run(grid, "deepspeed-2024"))
    for elements, group in ((12e9, 1e9), (2e9, 0.5e9)):
        blocks = update_bytes(deepspeed, grid.as_arrays(), (np.array([elements]),), 0.0)
        assert np.all(blocks.needed == 6 * group) and np.all(blocks.reserved == 6 * group)


def test_bfloat16_gradients_stay_beside_those_in_float32() -> None:
    """And are turned into what is sent, all at once, when activations are gone: where these are few it is the peak."""
    grid = PlanGrid(dp=4, tp=8, pp=1, microbatch=1, global_batch=64, zero=1, recompute="full", precision="bf16")
    bf16, fp16 = (
        peak_memory(run(replace(grid, precision=number), "megatron-deepspeed"), shipped())
        for number in ("bf16", "fp16")
    )
    elements = float(bf16.parameters) / 2
    assert (bf16.gradients, bf16.optimizer) == (6 * elements, 12 * elements / 4)
    assert (fp16.gradients, fp16.optimizer) == (2 * elements, 16 * elements / 4)
    step = float(bf16.activations + bf16.working + bf16.buffers)
    wide = replace(SHAPE, hidden=16384, ffn=65536, heads=128, kv_heads=128)
    few = peak_memory(run(grid, "megatron-deepspeed", wide), shipped())
    state = float(few.parameters + few.gradients + few.optimizer)
    assert step > 2 * elements
    assert float(few.process) == pytest.approx(state + float(few.parameters) + 1.2e9)


def test_what_the_allocator_gives_back_is_reserved_and_not_needed() -> None:
    for grid in (GRID, replace(GRID, pp=4), replace(GRID, dp=4, zero=1, global_batch=64)):
        for memory in rank_memory(run(grid), shipped()):
            assert memory.reserved(80e9) == memory.total + memory.slack > memory.total
            assert memory.process < memory.reserved(80e9) + 2e9
            # Of a plan that nearly fills a device, no more is reserved than there is, and no less than is in use.
            assert memory.reserved(memory.total + 1e6) == memory.total + 1e6
            assert memory.reserved(memory.total - 1e6) == memory.total


def test_software_that_says_nothing_holds_what_lies_idle_alone() -> None:
    memory = peak_memory(run(GRID, "megatron-core"), shipped())
    idle = 0.12 * float(memory.activations + memory.working + memory.buffers)
    assert float(memory.slack) == pytest.approx(idle)
    assert "slack" not in memory.as_dict()  # it is no part of what a process needs


def test_torch_npu_takes_blocks_back_when_a_collective_is_waited_for() -> None:
    """As by erase_stream, on by default since December 2023: no block waits for its stream."""
    plan = run(GRID)
    on_cuda, on_npu = (peak_memory(replace(plan, device=name), shipped()) for name in ("a100-sxm-80g", "ascend-910b"))
    assert on_npu.total == on_cuda.total
    lost = shipped()["common.memory_lost"] * (on_npu.activations + on_npu.working + on_npu.buffers)
    assert on_npu.overhead == pytest.approx(shipped()["common.context_bytes"] + lost)
    assert on_npu.overhead < on_cuda.overhead


def test_the_chance_that_a_plan_fits() -> None:
    assert fit_chance(80e9, 80e9) == 0.5
    # Student's distribution with two degrees of freedom: its integral beyond one spread, beyond three, and far out.
    for spreads in (1.0, 3.0, 11.5):
        density = lambda x: (2 + x**2) ** -1.5  # noqa: E731
        beyond = sum(density(spreads + (n + 0.5) / 100) / 100 for n in range(100_000))
        assert fit_chance(80e9 * np.exp(spreads * SPREAD), 80e9) == pytest.approx(beyond, abs=1e-4)
        assert fit_chance(80e9, 80e9 * np.exp(spreads * SPREAD)) == pytest.approx(1 - beyond, abs=1e-4)
    assert fit_chance(40e9, 80e9) > 0.99 and fit_chance(160e9, 80e9) < 0.01
    assert fit_chance(75e9, 80e9, UNNAMED_SPREAD) < 0.6 < 0.8 < fit_chance(75e9, 80e9)
    for chance in (0.01, 0.2, 0.5, 0.8, 0.999):
        assert fit_chance(most_needed_bytes(80e9, chance), 80e9) == pytest.approx(chance)
    assert (fit_chance(0.0, 80e9), fit_chance(1e9, 0.0)) == (1.0, 0.0)


def test_what_lies_idle_between_blocks_counts_where_there_is_room() -> None:
    """15 public logs of Megatron-LM have a median of 12 % of what a step allocates; segments that grow lose little, and
    whether a plan fits does not count it."""
    idle, lost = shipped()["common.memory_idle"], shipped()["common.memory_lost"]
    grid = replace(GRID, tp=1, sequence_parallel=False)
    for software, share in (("megatron-core", idle), ("torchtitan-2025", lost)):
        memory = peak_memory(run(grid, software), shipped())
        step_bytes = float(memory.activations + memory.working + memory.buffers)
        assert float(memory.slack) == pytest.approx(share * step_bytes)
        assert float(memory.overhead) == pytest.approx(shipped()["common.context_bytes"] + lost * step_bytes)


def test_a_loop_of_layers_gathers_one_at_a_time() -> None:
    """ZeRO-3 of XLA holds one gathered layer of 2 bytes an element and the gradient of its largest weight of 4, or a
    table and its gradient beside the loss; what fetches ahead holds two layers, the tables, and a layer's gradients."""
    grid = replace(GRID, dp=8, tp=1, sequence_parallel=False, zero=3)
    loop = software_of("xla")
    layer, weight, table = 4 * 1024**2 + 3 * 1024 * 4096 + 2 * 1024, 1024 * 4096, 32768 * 1024
    assert (loop.gathered_layers, software_of("megatron-core").gathered_layers) == (1, 2)
    small = replace(SHAPE, vocab=1024)  # the loss needs less than the backward of a layer
    in_loop = float(peak_memory(run(grid, "xla", small), shipped()).buffers)
    assert in_loop == pytest.approx(2 * layer + 4 * weight, rel=0.001)
    fetched = float(peak_memory(run(grid, "megatron-core"), shipped()).buffers)
    assert fetched == pytest.approx(2 * (2 * layer + 2 * table) + 4 * layer, rel=0.001)
    at_loss = peak_memory(run(replace(grid, microbatch=1), "xla", replace(SHAPE, vocab=2**20)), shipped())
    logit_bytes = 2.0 * 4096 * 2**20
    assert float(at_loss.working + at_loss.buffers) == pytest.approx(logit_bytes + 6 * 2**30, rel=0.03)


@pytest.mark.parametrize(("expert_tp", "ep"), [(1, 1), (1, 4), (2, 2)])
def test_gradients_of_experts_in_a_loop_are_of_one_weight(expert_tp: int, ep: int) -> None:
    """Experts of one map are one weight of all experts of a rank; gate and up are two."""
    shape = replace(SHAPE, vocab=1024, experts=ExpertShape(num=8, topk=2, ffn=4096))
    grid = replace(GRID, dp=8, tp=2, ep=ep, expert_tp=expert_tp, zero=3)
    held = gathered_bytes(run(grid, "xla", shape), software_of("xla"), 0.0, 1)
    assert float(held[0]) == pytest.approx(4 * 8 * 1024 * 4096 / ep / expert_tp)
