"""Bytes of products in fp8, of FSDP's ZeRO-2, of experts that ZeRO leaves whole or that are recomputed."""

from dataclasses import replace

import pytest

from shardwright.config.model_shape import ModelShape
from shardwright.config.section_shapes import ExpertShape, LatentShape
from shardwright.config.software import software_of
from shardwright.cost.calibration import shipped
from shardwright.layers.chains import chains, kept_bytes, share_run_again
from shardwright.layers.query import PlanGrid, Run
from shardwright.memory.rank_estimate import Memory, peak_memory
from shardwright.simulate.closed_form import step_time

LLAMA = ModelShape(
    layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008, gated=True, vocab=32000, sequence=4096
)
STREAM = LLAMA.sequence * LLAMA.hidden
MATRICES = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
MIXTURE = replace(LLAMA, ffn=0, kv_heads=8, experts=ExpertShape(num=16, topk=4, ffn=2048))


def run_of(software: str, shape: ModelShape = LLAMA, **plan: object) -> Run:
    grid = PlanGrid(dp=8, zero=2, global_batch=8, gradient_bytes=2, moment_bytes=2, has_masters=False)
    return Run(
        shape,
        replace(grid, **plan),
        device="h100-sxm",
        software=software,
        devices_per_node=8,
        node_bytes_per_s=450e9,
        network_bytes_per_s=50e9,
    )


def memory_of(software: str, shape: ModelShape = LLAMA, **plan: object) -> Memory:
    return peak_memory(run_of(software, shape, **plan), shipped())


@pytest.mark.parametrize("software", ["megatron-core", "nemo", "thunder", "litgpt-compile"])
def test_products_in_fp8_keep_their_inputs_in_a_byte(software: str) -> None:
    """The inputs of query, key and value, of gate and up, and of down; attention's result is there in both forms."""
    narrow, wide = (
        kept_bytes(chains(LLAMA, PlanGrid(precision=number), software_of(software))["dense"], "none")
        for number in ("fp8", "bf16")
    )
    assert wide - narrow == 2 * STREAM + LLAMA.sequence * LLAMA.ffn - STREAM
    blocks = kept_bytes(chains(LLAMA, PlanGrid(precision="nvfp4"), software_of(software))["dense"], "none")
    assert blocks == wide


def test_casts_of_weights_stay_unless_parameters_are_in_fp8() -> None:
    """Transformer Engine keeps a cast and its transpose: a byte each of every element of the layers' matrices."""
    plan = {"dp": 1, "zero": 0, "global_batch": 1}
    narrow, wide, gathered = (
        float(memory_of(name, precision=number, **plan).parameters)
        for name, number in (("thunder", "fp8"), ("thunder", "bf16"), ("thunder+float8-gather", "fp8"))
    )
    assert narrow - wide == pytest.approx(2 * MATRICES, rel=0.001)
    assert gathered == wide


def test_zero_2_of_fsdp_has_shards_beside_what_it_gathered() -> None:
    elements = MATRICES + 2 * 32000 * 4096
    assert float(memory_of("litgpt").parameters) == pytest.approx((2 + 2 / 8) * elements, rel=0.001)
    updated = memory_of("transformers-2025", has_masters=True, moment_bytes=4)
    assert float(updated.parameters) == pytest.approx((2 + 4 / 8) * elements, rel=0.001)
    in_bytes = memory_of("litgpt-compile+float8-gather", precision="fp8")
    assert float(in_bytes.parameters) == pytest.approx((2 + 2 / 8) * elements - MATRICES, rel=0.001)
    assert float(memory_of("megatron-core").parameters) == pytest.approx(2 * elements, rel=0.01)


def test_experts_that_zero_leaves_whole_are_on_each_rank_that_holds_them() -> None:
    plan = {"zero": 3, "ep": 2}
    experts = 32 * 16 / 2 * 3 * 4096 * 2048
    cut, whole = (memory_of(f"transformers-2025{change}", MIXTURE, **plan) for change in ("", "+whole-experts"))
    assert float(whole.parameters) - float(cut.parameters) == pytest.approx(2 * experts * 3 / 4, rel=0.001)
    assert float(whole.optimizer) - float(cut.optimizer) == pytest.approx(4 * experts * 3 / 4, rel=0.001)
    # No experts are gathered, and their gradients are summed in place of scattered.
    assert float(whole.buffers) < 0.4 * float(cut.buffers)
    slow = {"network_bytes_per_s": 1e9, "devices_per_node": 1}
    seconds = [
        float(step_time(replace(run_of(f"transformers-2025{change}", MIXTURE, **plan), **slow), shipped()).total)
        for change in ("", "+whole-experts")
    ]
    assert seconds[1] < seconds[0]


def test_a_layer_whose_experts_are_recomputed_keeps_attention_and_two_sums() -> None:
    """Of the half with experts its input alone, of the other all but its norm's result."""
    chain = chains(MIXTURE, PlanGrid(precision="bf16"), software_of("megatron-core"))["experts"]
    heads = LLAMA.sequence * (32 + 2 * 8) * 128
    sums = 4 * LLAMA.sequence * LLAMA.heads
    assert kept_bytes(chain, "experts") == 2 * (2 * STREAM + heads + STREAM) + sums
    again = {operator.name for operator in chain if share_run_again(operator, "experts")}
    assert {
        "attention norm",
        "norm before experts",
        "router",
        "dispatch",
        "expert up",
        "expert down",
        "combine",
    } <= again
    assert not again & {"qkv", "attention", "out", "attention join", "mlp join"}


def test_tables_that_a_rank_holds_are_not_cast() -> None:
    small, large = (
        float(memory_of("thunder", replace(LLAMA, vocab=vocab), precision="fp8", zero=0).parameters)
        - float(memory_of("thunder", replace(LLAMA, vocab=vocab), zero=0).parameters)
        for vocab in (32000, 128000)
    )
    assert small == large


def test_a_policy_of_heads_keeps_query_key_and_value_beside_attention() -> None:
    """All products but the first are computed again."""
    chain = chains(MIXTURE, PlanGrid(precision="bf16"), software_of("xla"))["dense"]
    heads, sums = LLAMA.sequence * (32 + 2 * 8) * 128, 4 * LLAMA.sequence * LLAMA.heads
    assert kept_bytes(chain, "heads") == 2 * (2 * STREAM + heads) + sums
    kept = {operator.name for operator in chain if not share_run_again(operator, "heads")}
    assert kept == {"qkv", "rotary", "attention"}


def test_fsdp_keeps_gradients_of_shards_on_the_host_with_the_optimizer() -> None:
    plan = {"zero": 3, "offload_optimizer": 1.0, "offload_parameters": 1.0}
    assert float(memory_of("fsdp-2024", **plan).gradients) == 0.0
    assert float(memory_of("kempnerforge", **plan).gradients) > 0.0


def test_a_weight_larger_than_zero_3_gathers_ahead_is_gathered_whole() -> None:
    wide = replace(LLAMA, hidden=32768, head_dim=1024, ffn=131072, layers=4)
    matrix = 32768 * 131072
    buffers = float(memory_of("deepspeed-2021", wide, zero=3, precision="fp16").buffers)
    assert buffers == pytest.approx(2 * 2 * matrix, rel=0.001)
    assert float(memory_of("deepspeed-2021", zero=3, precision="fp16").buffers) == 2 * (1e9 + 5e8)


def test_a_policy_of_latents_makes_query_key_and_value_again_from_them() -> None:
    """Megatron-LM's mla_up_proj: what the norms of the latents give goes, too, and attention keeps its result."""
    shape = replace(LLAMA, latent=LatentShape(512, 256, plain=64, rotary=64, value=64))
    chain = chains(shape, PlanGrid(precision="bf16"), software_of("megatron-core"))["dense"]
    again = {operator.name for operator in chain if share_run_again(operator, "latents")}
    assert again == {"heads", "rotary"}
    made = LLAMA.sequence * (32 * (2 * (64 + 64) + 64) + 512 + 256)
    assert kept_bytes(chain, "none") - kept_bytes(chain, "latents") == 2 * made
