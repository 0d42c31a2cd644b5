"""The operators of a step against closed formulas: FLOPs, activation bytes, ZeRO's table, bytes of collectives."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.config import catalog
from shardwright.config.adapter import AdapterSpec
from shardwright.config.load import load_job, make_job
from shardwright.config.model_shape import ModelShape, shape_of
from shardwright.config.section_shapes import ExpertShape, LatentShape
from shardwright.config.software import software_of
from shardwright.config.software_changes import changed_fields
from shardwright.cost.calibration import shipped
from shardwright.cost.from_job import run_of
from shardwright.layers.chains import Chain, chains, kept_bytes, placeholder_elements, turn_bytes
from shardwright.layers.query import PlanGrid, Run
from shardwright.memory.rank_estimate import rank_memory
from shardwright.sharding.stage_parameters import num_parameters

GPT = ModelShape(4, 1024, 16, 16, 64, 4096, False, 51200, 512)
LLAMA = ModelShape(4, 1024, 16, 4, 64, 2816, True, 51200, 512)
MOE = replace(LLAMA, experts=ExpertShape(num=8, topk=2, ffn=512, shared_ffn=512, dense_layers=1))
LATENT = replace(MOE, latent=LatentShape(256, 128))
FULL_ATTENTION = software_of("megatron-2022")


def flops_of(chain: Chain) -> Any:
    """FLOPs of the forward."""
    return sum(operator.flops for operator in chain)


@pytest.mark.parametrize("shape", [GPT, LLAMA, MOE, LATENT], ids=["gpt", "llama", "moe", "latent"])
@pytest.mark.parametrize(
    "grid", [PlanGrid(), PlanGrid(tp=4), PlanGrid(tp=2, sequence_parallel=True, microbatch=3), PlanGrid(cp=2)]
)
def test_products_add_up_to_six_a_parameter_and_token(shape: ModelShape, grid: PlanGrid) -> None:
    pieces = chains(shape, grid, FULL_ATTENTION)
    dense = sum(shape.is_dense(layer) for layer in range(shape.layers))
    results = dense * flops_of(pieces["dense"]) + flops_of(pieces["head"])
    if shape.experts:
        results += (shape.layers - dense) * flops_of(pieces["experts"])
    tokens = grid.microbatch * shape.sequence / grid.cp
    expected = shape.flops_per_token() * tokens / grid.tp
    # A latent's down projections are on every tp rank, for its own tokens under sequence parallel. A router is no model
    # parameter of the formula.
    exact = 2e-3 if shape.experts else 1e-9
    if not shape.latent or grid.tp == 1 or grid.sequence_parallel:
        assert 3 * results == pytest.approx(expected, rel=exact)
    else:
        assert 3 * results > expected


def test_flash_attention_computes_half_of_the_scores() -> None:
    scores = [o.scores for o in chains(GPT, PlanGrid(), software_of("nemo"))["dense"] if o.scores]
    assert len(scores) == 1
    assert scores[0].flops == 2 * GPT.sequence**2 * GPT.hidden


@pytest.mark.parametrize("t", [1, 2, 8])
def test_activations_are_those_of_korthikanti_and_others(t: int) -> None:
    """arXiv 2205.05198, table 2: bytes of a layer by s b h."""
    s, b, h, a = GPT.sequence, 3, GPT.hidden, GPT.heads
    scores = 5 * a * s / h

    def kept(policy: str, sequence_parallel: bool) -> float:
        grid = PlanGrid(tp=t, microbatch=b, sequence_parallel=sequence_parallel)
        return kept_bytes(chains(GPT, grid, FULL_ATTENTION)["dense"], policy) / (s * b * h)

    assert kept("none", False) == pytest.approx(10 + 24 / t + scores / t)
    assert kept("none", True) == pytest.approx((34 + scores) / t)
    assert kept("selective", True) == pytest.approx(34 / t)
    assert kept("full", False) == pytest.approx(2)


def test_another_kernel_of_attention_brings_its_own_softmax() -> None:
    """By score: a softmax in 16 bits reads and writes 2 bytes, its backward reads 4 and writes 2; dropout reads and
    writes 2 and writes or reads a mask of 1. torch's softmax keeps float32 and a copy in 16 bits; dropout 3 more."""
    assert FULL_ATTENTION.softmax_bytes == (4 + 5, 6 + 5)
    assert software_of("megatron-deepspeed").softmax_bytes == (4, 6)  # without dropout
    in_torch = software_of("megatron-2021+torch")
    assert in_torch.softmax_bytes == (22 + 5, 22 + 5)
    scores = GPT.heads * GPT.sequence**2
    fused, single = (
        next(o for o in chains(GPT, PlanGrid(), software)["dense"] if o.name == "attention")
        for software in (FULL_ATTENTION, in_torch)
    )
    assert single.kept - fused.kept == (6 + 3 - 5) * scores
    assert single.forward_bytes - fused.forward_bytes == (22 - 4) * scores
    stated = FULL_ATTENTION.model_copy(update={"softmax": (1.0, 2.0)})  # by software of one's own
    changes = changed_fields("torch", dict(stated))
    assert stated.softmax_bytes == (1, 2) and stated.model_copy(update=changes).softmax_bytes == (27, 27)


def test_software_keeps_what_it_does_not_gather_again() -> None:
    """The inputs of both products behind norms, whole on each of 4 ranks: 2 bytes by element, and no gather of them in
    the backward. Without sequence parallel they are whole anyway."""
    grid, stream = PlanGrid(tp=4, sequence_parallel=True), GPT.sequence * GPT.hidden
    again = FULL_ATTENTION.model_copy(update={"gathers_again": True})
    once = FULL_ATTENTION.model_copy(update={"gathers_again": False})

    def gathered_bytes(chain: Chain) -> float:
        exchanges = [exchange for operator in chain for exchange in operator.backward]
        return float(sum(exchange.size for exchange in exchanges if exchange.kind == "all_gather"))

    few, many = (chains(GPT, grid, software)["dense"] for software in (again, once))
    assert kept_bytes(many, "none") - kept_bytes(few, "none") == 2 * 2 * stream * 3 / 4
    assert gathered_bytes(few) - gathered_bytes(many) == 2 * 2 * stream
    split = replace(grid, sequence_parallel=False)
    assert kept_bytes(chains(GPT, split, once)["dense"], "none") == kept_bytes(
        chains(GPT, split, again)["dense"], "none"
    )
    for policy in ("full", "matmul"):  # of a layer's input a rank keeps its own part, whatever its products keep
        assert kept_bytes(many, policy) == kept_bytes(few, policy)
    assert kept_bytes(many, "full") == 2 * stream / 4
    assert not software_of("torchtitan").gathers_again and software_of("nanotron").gathers_again


def test_a_backward_needs_gradients_where_the_layer_is_widest() -> None:
    """At a gated activation: the stream's gradient, and those of gate and up; that of its result takes the place of the
    result. Where its scores are kept attention needs most: their gradients twice, and their own where made again."""
    tokens = GPT.sequence
    wide = chains(replace(LLAMA, ffn=8 * LLAMA.ffn), PlanGrid(), software_of("megatron-core"))["dense"]
    assert turn_bytes(wide, "none") == 2 * tokens * (LLAMA.hidden + 2 * 8 * LLAMA.ffn)
    long = replace(GPT, sequence=8 * tokens)
    software = FULL_ATTENTION.model_copy(update={"dropout": False})
    layer = chains(long, PlanGrid(), software)["dense"]
    kept, again = turn_bytes(layer, "none"), turn_bytes(layer, "selective")
    scores = long.heads * long.sequence**2
    assert again - kept == 2 * scores
    assert 4 * scores > kept > 0.85 * 4 * scores  # what the MLP had kept is free


def test_a_backward_of_attention_holds_keys_of_other_ranks() -> None:
    """Of 4 ranks with 128 of 512 tokens each: 4 heads of keys and of values, 16 of queries, 64 wide, in 16 bits."""
    keys, queries = 128 * 2 * 4 * 64, 128 * 16 * 64  # elements of one rank

    def inside(software: str, **changes: Any) -> Any:
        described = software_of(software).model_copy(update=changes)
        grid = PlanGrid(cp=4, cp_method="all-gather" if software != "megatron-core" else "ring")
        (core,) = (o for o in chains(LLAMA, grid, described)["dense"] if o.scores)
        return core.inside

    accumulated = 4 * queries  # gradients of queries within the kernel
    assert inside("llama3") == accumulated + 2 * 4 * keys + 2 * 4 * keys  # all keys, and their gradients
    # torch's context_parallel: all keys; gradients of one rank's and what arrives, in float32, and of queries so.
    assert inside("transformers-2026") == 2 * accumulated + 2 * 4 * keys + 2 * 4 * keys
    assert inside("transformers-2026", visits_in_float32=False) == inside("llama3")
    assert inside("megatron-core") == accumulated + 2 * (2 + 2) * keys  # round a ring: in use, and on their way
    (alone,) = (o for o in chains(LLAMA, PlanGrid(), software_of("llama3"))["dense"] if o.scores)
    assert alone.inside == 4 * accumulated


def test_a_shape_of_weights_has_one_placeholder() -> None:
    """As TransformerEngine keeps them: the shared expert's weights have the shapes of a routed one's."""
    pieces = chains(MOE, PlanGrid(tp=2), software_of("megatron-core"))
    h, qkv, out = MOE.hidden, MOE.hidden * (16 + 2 * 4) * 64 // 2, MOE.hidden * 512
    dense = qkv + out + h * (2 * MOE.ffn + MOE.ffn) // 2
    assert placeholder_elements([pieces["dense"]]) == dense
    experts = replace(LLAMA, experts=ExpertShape(num=8, topk=2, ffn=256, shared_ffn=512, dense_layers=1))
    result = chains(experts, PlanGrid(tp=2), FULL_ATTENTION)  # tp leaves half of the shared expert
    routed = 3 * h * 256 + 8 * h
    assert placeholder_elements((result["dense"], result["experts"])) == dense + routed
    assert placeholder_elements([pieces["dense"], pieces["dense"]]) == dense


@pytest.mark.parametrize(("zero", "fixed", "shared"), [(0, 16, 0), (1, 4, 12), (2, 2, 14), (3, 0, 16)])
@pytest.mark.parametrize("d", [2, 64])
def test_state_is_zeros_table(zero: int, fixed: float, shared: float, d: int) -> None:
    """Rajbhandari et al. 2020 (arXiv 1910.02054), figure 1: bytes a parameter in 16 bits with Adam."""
    run = Run(
        GPT,
        PlanGrid(dp=d, zero=zero, global_batch=d, precision="fp16"),
        device="a100-sxm-80g",
        software="megatron-2022",
        devices_per_node=8,
        node_bytes_per_s=0.0,
        network_bytes_per_s=0.0,
    )
    (memory,) = rank_memory(run, shipped())
    state = memory.parameters + memory.gradients + memory.optimizer
    # Final norm apart.
    assert state / (GPT.parameters - GPT.hidden) == pytest.approx(fixed + shared / d, rel=1e-9)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_moves_as_much_with_sequence_parallel(sequence_parallel: bool) -> None:
    """Two all-reduces each way are as many bytes on the wire as four gathers and scatters, apart from the re-gather."""
    grid = PlanGrid(tp=2, sequence_parallel=sequence_parallel)
    layer = chains(GPT, grid, FULL_ATTENTION)["dense"]
    rounds = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
    size = 2 * GPT.sequence * GPT.hidden
    forward = sum(rounds[e.kind] * e.size for o in layer for e in o.forward if e.axis == "tp")
    backward = sum(rounds[e.kind] * e.size for o in layer for e in o.backward if e.axis == "tp")
    assert forward == 4 * size
    assert backward == (4 + 2 * sequence_parallel) * size


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.booleans())
def test_degrees_of_one_communicate_nothing(microbatch: int, layers: int, heads: int, gated: bool) -> None:
    shape = replace(LLAMA, layers=layers, heads=8 * heads, gated=gated)
    for chain in chains(shape, PlanGrid(microbatch=microbatch), FULL_ATTENTION).values():
        assert not any(exchange.size for operator in chain for exchange in operator.forward + operator.backward)


def test_a_job_is_a_run() -> None:
    job = make_job(
        {"model": {"name": "llama3-8b"}, "plan": {"dp": 2, "tp": 2}, "cluster": {"device": "h100-sxm"}}
        | {"precision": json.loads('{"compute": "bf16"}')}
    )
    run = run_of(job)
    assert (run.grid.dp, run.grid.tp, run.grid.world) == (2, 2, 4)
    assert run.device == "h100-sxm"
    assert run.shape.hidden == job.model.hidden


@pytest.mark.parametrize("name", sorted(catalog.names("models")))
def test_a_job_is_predicted_as_the_model_that_runs(name: str) -> None:
    """Parameters and FLOPs of the predicted shape are those of the model; norms, biases and gates aside."""
    job = make_job({"model": catalog.read("models", name) | {"name": name}})
    shape = shape_of(job.model)
    assert shape.parameters == pytest.approx(num_parameters(job.model), rel=1e-2)
    assert shape.flops_per_token() == pytest.approx(shape_of(job.model).flops_per_token(), rel=1e-6)


def test_recomputed_latent_attention_keeps_its_latents_alone() -> None:
    """DeepSeek-V3 (arXiv 2412.19437, section 3.2.3) makes heads of latents again instead of keeping them."""
    job = load_job("deepseek-v3")
    run = run_of(job)
    layer = chains(run.shape, run.grid, software_of(run.software))["dense"]
    tokens, heads = 4096, 128
    made = 2 * tokens * heads * (192 + 192 + 128)  # queries, keys and values
    normal = 2 * tokens * (1536 + 512)
    attended = tokens * heads * (2 * 128 + 4)  # and the softmax's sums
    assert kept_bytes(layer, "none") - kept_bytes(layer, "attention") == pytest.approx(made + normal + attended)


def test_tp_ranks_of_paddlenlp_keep_a_copy_of_the_input_of_each_product() -> None:
    """Three of attention, two of a gated MLP, where a rank has all tokens; under sequence parallel, or alone, one."""
    software = software_of("paddlenlp")
    kept = {
        (tp, sp): {
            o.name: o.kept / o.given
            for o in chains(LLAMA, PlanGrid(tp=tp, sequence_parallel=sp), software)["dense"]
            if o.name in ("attention enter", "mlp enter")
        }
        for tp, sp in ((1, False), (2, False), (2, True))
    }
    assert kept[1, False] == {"attention enter": 1.0, "mlp enter": 1.0}
    assert kept[2, False] == {"attention enter": 3.0, "mlp enter": 2.0}
    assert kept[2, True] == {"attention enter": 0.5, "mlp enter": 0.5}  # of what the ranks gather
    assert kept_bytes(chains(LLAMA, PlanGrid(tp=2), software)["dense"], "full") == 2 * LLAMA.sequence * LLAMA.hidden


def test_adapters_are_in_16_bits_beside_a_frozen_base_in_fp8() -> None:
    shape = replace(GPT, adapter=AdapterSpec(rank=8))
    chain = chains(shape, PlanGrid(precision="fp8"), software_of("nemo"))["dense"]
    products = [p for o in chain for p in o.products if p.weight]
    assert {(p.is_frozen, p.is_wide) for p in products} == {(True, False), (False, True)}
    assert sum(p.is_wide for p in products) == 2 * 4  # A and B of each of four matrices
    bare = chains(shape, PlanGrid(), software_of("megatron-core"))["dense"]
    moved = [sum(float(o.forward_bytes) for o in one) for one in (chain, bare)]
    assert moved[0] > moved[1]  # sums of results, where the code of adapters is described
