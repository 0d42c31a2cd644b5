"""Every strategy of a plan has a price: its field reaches the cost model, and it trades what its paper says."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.config.model_shape import ModelShape
from shardwright.config.plan import PlanSpec
from shardwright.config.precision import PrecisionSpec
from shardwright.config.recompute_policy import NEEDS, OPERATORS
from shardwright.config.section_shapes import ExpertShape
from shardwright.config.software import software_of
from shardwright.cost.calibration import device_of, shipped
from shardwright.cost.from_job import run_of
from shardwright.layers.chains import chains, kept_bytes, share_run_again
from shardwright.layers.query import PlanGrid, Run, grid_of
from shardwright.memory.activations import layer_of
from shardwright.memory.budget import meet_budget
from shardwright.memory.rank_estimate import Memory, peak_memory
from shardwright.simulate.closed_form import StepTime, step_time

CONSTANTS = shipped()
LLAMA = ModelShape(16, 4096, 32, 8, 128, 14336, True, 128256, 4096)
RUN = Run(
    LLAMA,
    PlanGrid(dp=8, tp=2, global_batch=64),
    device="h100-sxm",
    software="megatron-core",
    devices_per_node=8,
    node_bytes_per_s=450e9,
    network_bytes_per_s=50e9,
)


def priced(**fields: object) -> tuple[StepTime, Memory]:
    run = replace(RUN, grid=replace(RUN.grid, **fields))
    return step_time(run, CONSTANTS), peak_memory(run, CONSTANTS)


def job(**sections: dict) -> JobSpec:
    return make_job({"model": {"name": "llama3-8b"}, "cluster": {"device": "h100-sxm"}, **sections})


PLAN = {"dp": 2, "tp": 2, "pp": 2, "cp": 2, "recompute": "selective"}
OTHER = {
    "dp": 4, "tp": 4, "pp": 4, "cp": 4, "cp_method": "ulysses", "ep": 2, "expert_tp": 1, "dispatch": "node-aware",
    "microbatch_size": 2, "schedule": "gpipe", "virtual_stages": 2, "extra_warmup": 1, "sequence_parallel": True,
    "zero": 1, "zero_ranks": 2, "offload_optimizer": 0.5, "offload_parameters": True, "layout": [15, 17],
    "recompute": "full", "recompute_operators": ["norm"], "recompute_every": 2,
    "recompute_layers": [["layer"]] + 31 * [[]], "memory_limit_gib": 0.002, "offload_activations": True,
    "order": "pp-dp", "bucket_mib": 50.0, "reduce_each": "run",
    "compress": "int8", "compress_rank": 8, "compress_share": 0.1,
}  # fmt: skip
# most_alive is of schedule auto, whose program is simulated; compress_least of tensors too small to matter;
# loss_chunk_mib is asked of the account, by the job; and fallback has plans of its own.
NOT_PRICED = {
    "most_alive",
    "compress_least",
    "loss_chunk_mib",
    "fallback",
    "loss_scale",
    "loss_scale_growth_steps",
    "float8_history",
}
SETTING = {
    "virtual_stages": {"schedule": "interleaved-1f1b"}, "recompute_layers": {"recompute": "layers"},
    "memory_limit_gib": {"recompute": "budget", "memory_limit_gib": 200.0},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(PlanSpec.model_fields) - NOT_PRICED))
def test_every_field_of_a_plan_reaches_the_cost_model(name: str) -> None:
    plan = PLAN | {"recompute_layers": 32 * [[]]} | SETTING.get(name, {})
    base = job()
    # Rules between fields are not checked here, for some values need other fields beside them.
    plans = [PlanSpec.model_validate(plan | changed) for changed in ({}, {name: OTHER[name]})]
    one, two = (run_of(meet_budget(base.model_copy(update={"plan": plan}))).grid for plan in plans)
    assert one != two


def test_every_field_of_precision_reaches_the_cost_model() -> None:
    others = {"compute": "fp16", "gradients": "compute", "reduce": "float32", "float8": "rowwise", "moments": "bf16",
              "float8_weight_gradients": True, "float8_dispatch": True, "master": "none"}  # fmt: skip
    assert set(others) == set(PrecisionSpec.model_fields) - NOT_PRICED
    base = {"compute": "bf16", "gradients": "compute"}
    # Rules between fields are not checked here, for some values need other fields beside them.
    fields = [base | {name: value} for name, value in others.items() if name != "gradients"]
    grids = [grid_of(job().model_copy(update={"precision": PrecisionSpec.model_validate(of)})) for of in fields]
    grids += [grid_of(job(precision=base)), grid_of(job(precision={"compute": "bf16"}))]
    assert len(set(grids)) == len(grids)


# --- context parallel ---


def test_ring_hides_behind_attention_and_the_others_do_not() -> None:
    shape = replace(LLAMA, sequence=65536)
    times = {}
    for method in ("ring", "all-gather", "ulysses"):
        grid = PlanGrid(cp=4, global_batch=8, cp_method=method)
        times[method] = step_time(replace(RUN, shape=shape, grid=grid), CONSTANTS).context
    assert 0 < times["ring"] < times["all-gather"]
    assert 0 < times["ulysses"] < times["all-gather"]  # each rank sends its own tokens only


def test_bytes_of_context_parallel() -> None:
    """By rank in one layer, numbers of 2 bytes: ring and all-gather move keys and values of all, ulysses its own."""
    keys = 2 * 4096 * (8 * 2 * 128)  # all tokens, 8 heads of keys and of values
    own = 2 * 4096 // 4
    results = {}
    for method in ("ring", "all-gather", "ulysses"):
        layer = chains(LLAMA, PlanGrid(cp=4, cp_method=method), software_of("megatron-core"))["dense"]
        results[method] = [
            [(e.kind, e.size) for o in layer for e in way(o) if e.size]
            for way in (lambda o: o.forward, lambda o: o.backward)
        ]
    assert results["ring"] == [[("ring", keys)], [("ring", 2 * keys)]]
    assert results["all-gather"] == [[("all_gather", keys)], [("all_gather", keys), ("reduce_scatter", keys)]]
    traded, back = own * (32 + 16) * 128, own * 32 * 128
    assert results["ulysses"][0] == [("all_to_all", traded), ("all_to_all", back)]
    assert sorted(results["ulysses"][1]) == sorted(results["ulysses"][0])


# --- what is not kept ---


SETS = st.sets(st.sampled_from(OPERATORS)).filter(lambda names: all(NEEDS[n] in names for n in names if n in NEEDS))


@given(SETS, SETS)
def test_the_more_runs_again_the_less_is_kept(one: set[str], two: set[str]) -> None:
    layer = chains(LLAMA, PlanGrid(tp=2), software_of("megatron-core"))["dense"]

    def kept_and_flops(names: set[str]) -> tuple[float, float]:
        policy = "+".join(sorted(names)) or "none"
        return kept_bytes(layer, policy), sum(share_run_again(o, policy) * o.flops for o in layer)

    less, more = kept_and_flops(one | two), kept_and_flops(one)
    assert less[0] <= more[0]
    assert less[1] >= more[1]
    assert kept_bytes(layer, "full") <= less[0]


@pytest.mark.parametrize("names", [(), ("attention",), ("norm", "activation"), ("qkv", "attention"), OPERATORS])
def test_a_policy_keeps_what_the_runtime_keeps(names: tuple[str, ...]) -> None:
    """The account of our own runtime and the description of a fused framework agree but for what kernels fuse."""
    of = job(plan={"tp": 2}, precision={"compute": "bf16"})
    own = layer_of(of, 0, 0).kept_bytes(frozenset(names))
    run = run_of(of)
    layer = chains(run.shape, run.grid, software_of("megatron-core"))["dense"]
    assert kept_bytes(layer, "+".join(sorted(names)) or "none") == pytest.approx(own, rel=0.35)


def test_a_stage_that_runs_again_keeps_its_input_alone() -> None:
    small = replace(RUN, shape=replace(LLAMA, vocab=512))
    full, stage = (
        (step_time(run, CONSTANTS), peak_memory(run, CONSTANTS))
        for policy in ("full", "stage")
        if (run := replace(small, grid=PlanGrid(pp=4, dp=2, recompute=policy, global_batch=32)))
    )
    assert stage[0].again == pytest.approx(full[0].again)
    assert stage[1].activations < full[1].activations
    assert stage[1].working > full[1].working


def test_every_second_layer_computes_half_again() -> None:
    full = priced(recompute="full")[0].again
    half = priced(recompute="mixed", policies=("full", "none") * 8)[0].again
    assert half == pytest.approx(full / 2)


# --- offloading ---


@pytest.mark.parametrize(
    "fields",
    [{"offload_optimizer": 0.5}, {"offload_optimizer": 1.0, "zero": 1}, {"offload_parameters": True, "zero": 3},
     {"offload_activations": True, "recompute": "full"}],
)  # fmt: skip
def test_what_is_offloaded_is_on_the_host_and_costs_time(fields: dict) -> None:
    kept = {name: value for name, value in fields.items() if not name.startswith("offload")}
    (here, memory), (there, offloaded) = priced(**kept), priced(**fields)
    assert there.total > here.total
    assert memory.host == 0
    freed = memory.total - offloaded.total
    assert 0 < freed <= offloaded.host
    if "offload_optimizer" not in fields:  # there also a gradient goes over
        assert freed == pytest.approx(offloaded.host)


def test_offloading_needs_a_known_host() -> None:
    run = replace(RUN, device="tpu-v4", grid=replace(RUN.grid, offload_optimizer=1.0))
    with pytest.raises(KeyError, match="host_gb_per_s"):
        step_time(run, CONSTANTS)
    assert device_of("a100-sxm-80g").host_gb_per_s == 32


# --- gradients ---


def test_compression_sends_less_and_keeps_errors() -> None:
    slow = replace(RUN, network_bytes_per_s=1e9, devices_per_node=1)
    run = {
        name: replace(slow, grid=replace(slow.grid, compress=name, tp=1))
        for name in ("none", "bf16", "int8", "powersgd")
    }
    times = [step_time(of, CONSTANTS).data for of in run.values()]
    assert times == sorted(times, reverse=True)
    assert times[1] == pytest.approx(times[0] / 2, rel=0.05)
    memory = {name: peak_memory(of, CONSTANTS).gradients for name, of in run.items()}
    assert memory["none"] == memory["bf16"]
    assert memory["int8"] == memory["powersgd"] == 2 * memory["none"]


def test_buckets_that_overlap_leave_the_last_one() -> None:
    run = replace(RUN, software="nemo", grid=replace(RUN.grid, bucket_bytes=2.0**30))
    assert software_of("nemo").reduce_overlap
    whole = replace(run, grid=replace(run.grid, bucket_bytes=0.0))
    small = replace(run, grid=replace(run.grid, bucket_bytes=2.0**14))
    assert math.isfinite(step_time(whole, CONSTANTS).data)
    assert step_time(small, CONSTANTS).data > step_time(run, CONSTANTS).data  # latency of each


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_sums_of_input_gradients_travel_beside_weight_gradients(sequence_parallel: bool) -> None:
    """Megatron-LM since August 2021: the 2 all-reduces of a layer's backward are hidden of 4, but for what leaks; under
    sequence parallel 2 scatters, of 8 halves and 2 gathers for weight gradients of which only the leak shows."""
    grid = replace(RUN.grid, sequence_parallel=sequence_parallel)
    earlier, later = (
        step_time(replace(RUN, grid=grid, software=software), CONSTANTS).tensor
        for software in ("megatron-2021", "megatron-2021-08")
    )
    leak = CONSTANTS["common.leak"]
    shown = 8 + 2 * leak if sequence_parallel else 4  # of a layer's halves of all-reduces, or whole ones
    assert later / earlier == pytest.approx(1 - 2 * (1 - leak) / shown, rel=0.03)


def test_a_token_that_crosses_once_takes_less_network() -> None:
    shape = replace(LLAMA, experts=ExpertShape(num=64, topk=8, ffn=2048))
    grid = PlanGrid(dp=32, ep=32, global_batch=64)
    once, each = (
        step_time(replace(RUN, shape=shape, grid=replace(grid, dispatch=way)), CONSTANTS).expert
        for way in ("node-aware", "direct")
    )
    assert 0 < once < each


@pytest.mark.parametrize("software", ["shardwright", "megatron-core"])
def test_moments_in_bf16_take_half(software: str) -> None:
    """4 bytes less of each parameter that a rank updates. The update moves 8 bytes less where one kernel does it all,
    and more in this runtime, where they are widened before it."""
    plan = {"dp": 4, "tp": 2, "zero": 1}
    cluster = {"device": "h100-sxm", "software": software}
    wide, half = (
        run_of(job(plan=plan, cluster=cluster, precision={"compute": "bf16", "moments": moments}))
        for moments in ("float32", "bf16")
    )
    more, less = peak_memory(wide, CONSTANTS), peak_memory(half, CONSTANTS)
    assert less.optimizer == pytest.approx(more.optimizer * 8 / 12)
    assert replace(less, optimizer=0.0) == replace(more, optimizer=0.0)
    slow, fast = step_time(wide, CONSTANTS).optimizer, step_time(half, CONSTANTS).optimizer
    moved = software_of(software)
    by_element = {"shardwright": 70 / 46, "megatron-core": (moved.update - 8) / moved.update}
    assert fast / slow == pytest.approx(by_element[software])


def test_published_runs_have_the_moments_of_their_software() -> None:
    """Where a job says them, it is the job that counts."""
    grid = PlanGrid(dp=8, global_batch=64)
    of = {
        name: peak_memory(replace(RUN, grid=grid, software=name), CONSTANTS).optimizer for name in ("hai-llm", "nemo")
    }
    assert of["hai-llm"] == pytest.approx(of["nemo"] * 8 / 12)
    answer = replace(RUN, grid=replace(grid, moment_bytes=4), software="hai-llm")
    assert peak_memory(answer, CONSTANTS).optimizer == of["nemo"]


def test_float32_moves_and_keeps_twice_as_much() -> None:
    half, full = (priced(precision=number) for number in ("bf16", "float32"))
    assert full[1].activations == pytest.approx(2 * half[1].activations)
    assert full[1].parameters == 2 * half[1].parameters
    assert full[0].tensor > 1.5 * half[0].tensor
    # 4 bytes of master weights, of moments and a gradient, or 2 more of a copy.
    assert full[1].parameters + full[1].optimizer < half[1].parameters + half[1].optimizer


def test_a_tied_table_on_two_ranks_is_summed_under_zero_3_too() -> None:
    """The two ranks with a copy of the table sum its whole gradient before it is sharded."""
    grid = replace(RUN.grid, dp=4, pp=2, zero=3)
    apart, tied = (replace(RUN, grid=grid, shape=replace(LLAMA, tied=is_tied)) for is_tied in (False, True))
    assert step_time(apart, CONSTANTS).data < step_time(tied, CONSTANTS).data
