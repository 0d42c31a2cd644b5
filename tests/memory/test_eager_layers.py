"""Tensors that layers of transformers keep in eager torch, against autograd, and its Trainer's state, by arithmetic."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from shardwright.config.model_shape import ModelShape
from shardwright.config.software import software_of
from shardwright.cost.calibration import shipped
from shardwright.layers.autocast import cast_bytes
from shardwright.layers.chains import chains, kept_bytes
from shardwright.layers.query import PlanGrid, Run
from shardwright.memory.rank_estimate import Memory, peak_memory

SHAPE = ModelShape(layers=2, hidden=256, heads=8, kv_heads=2, head_dim=32, ffn=704, gated=True, vocab=1000, sequence=64)
TOKENS = 2 * SHAPE.sequence


def saved_bytes(num_layers: int, number: torch.dtype = torch.bfloat16) -> int:
    """Bytes of all tensors that autograd saves for the backward of a Llama with weights of a number type, but
    parameters and tables."""
    config = LlamaConfig(
        vocab_size=SHAPE.vocab,
        hidden_size=SHAPE.hidden,
        intermediate_size=SHAPE.ffn,
        num_hidden_layers=num_layers,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).to(number)
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in known:
            saved[place] = tensor  # a tensor that is kept has its place for itself
        return tensor

    ids = torch.zeros(2, SHAPE.sequence, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    assert torch.isfinite(loss)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def test_a_layer_keeps_what_autograd_saves() -> None:
    """To the byte but for the two factors of norms, 4 bytes a token each, which the account leaves out. Casts of norms
    and the result of silu are in it."""
    layer = saved_bytes(2) - saved_bytes(1)
    chain = chains(SHAPE, PlanGrid(microbatch=2, precision="bf16"), software_of("transformers-2025"))["dense"]
    assert kept_bytes(chain, "none") == layer - 2 * 4 * TOKENS


MISTRAL = ModelShape(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, gated=True, vocab=32000, sequence=4096
)
POWERLM = ModelShape(
    layers=40, hidden=2304, heads=36, kv_heads=36, head_dim=64, ffn=9216, gated=True, vocab=49152, sequence=4096
)


def peak_of(shape: ModelShape, grid: PlanGrid, software: str = "transformers-2024") -> Memory:
    run = Run(
        shape,
        grid,
        device="a100-sxm-80g",
        software=software,
        devices_per_node=8,
        node_bytes_per_s=300e9,
        network_bytes_per_s=25e9,
    )
    return peak_memory(run, shipped())


IN_BF16 = PlanGrid(recompute="full", precision="bf16", gradient_bytes=2, moment_bytes=2, has_masters=False)


def test_an_update_of_all_tensors_at_once_copies_a_moment() -> None:
    """Weights, gradients, both moments and the roots of the second in 2 bytes each, with or without FSDP."""
    num_parameters = 7.242e9
    one = peak_of(MISTRAL, replace(IN_BF16, microbatch=4, global_batch=4))
    assert float(one.total) == pytest.approx(5 * 2 * num_parameters, rel=0.002)
    two = peak_of(MISTRAL, replace(IN_BF16, dp=2, zero=3, microbatch=2, global_batch=4))
    assert float(two.total) == pytest.approx(5 * 2 * num_parameters / 2, rel=0.01)
    fused = peak_of(MISTRAL, replace(IN_BF16, microbatch=4, global_batch=4), "transformers-2025")
    assert float(one.total) > float(fused.total)


def test_the_loss_of_a_single_microbatch_has_no_gradients_beside_it() -> None:
    """Where logits are the peak: weights and moments, the inputs of layers, and 12 bytes a logit. A second microbatch
    finds the gradients of the first."""
    single = peak_of(POWERLM, replace(IN_BF16, microbatch=8, global_batch=8))
    tokens, num_parameters = 8 * 4096, float(single.parameters) / 2
    logits, inputs = tokens * POWERLM.vocab, tokens * POWERLM.layers * POWERLM.hidden
    expected = 6 * num_parameters + 2 * inputs + 12 * logits
    assert float(single.total) == pytest.approx(expected, rel=0.02)
    several = peak_of(POWERLM, replace(IN_BF16, microbatch=8, global_batch=16))
    assert float(several.total) == pytest.approx(float(single.total) + 2 * num_parameters, rel=0.001)


def test_replicas_under_ddp_have_buckets_and_under_fsdp_none() -> None:
    """accelerate scatters gradients under FSDP with the last microbatch alone (no_sync): before it they are whole."""
    alone, ddp, fsdp, several = (
        peak_of(MISTRAL, replace(IN_BF16, dp=dp, zero=zero, microbatch=1, global_batch=batch))
        for dp, zero, batch in ((1, 0, 2), (2, 0, 2), (2, 3, 2), (2, 3, 8))
    )
    assert float(several.gradients) == float(alone.gradients)
    assert float(ddp.gradients) == 2 * float(alone.gradients) == 4 * float(fsdp.gradients)


def test_under_autocast_a_layer_keeps_float32_between_products_and_casts_of_weights() -> None:
    """To the byte but for the two factors of norms: inputs of norms, their normal results and the weights in float32,
    the input of each product once more in 16 bits, and each matrix."""
    saved = {}
    for num_layers in (1, 2):
        with torch.autocast("cpu", torch.bfloat16):
            saved[num_layers] = saved_bytes(num_layers, torch.float32)
    software = software_of("transformers-2025+autocast")
    chain = chains(SHAPE, PlanGrid(microbatch=2, precision="bf16"), software)["dense"]
    kept = kept_bytes(chain, "none") + cast_bytes(chain, software)
    assert kept == saved[2] - saved[1] - 2 * 4 * TOKENS


def test_fsdp_under_autocast_gathers_float32() -> None:
    grid = replace(IN_BF16, dp=2, zero=3, microbatch=1, global_batch=2, has_masters=True)
    narrow, wide = (peak_of(MISTRAL, grid, f"transformers-2024{change}") for change in ("", "+autocast"))
    layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    gathered = 2 * layer + 2 * 32000 * 4096
    # Two layers and both tables, and the gradients of a layer on their way, in 4 bytes in place of 2.
    assert float(wide.buffers) - float(narrow.buffers) == pytest.approx(2 * (gathered + layer), rel=0.001)
    assert float(wide.activations) == pytest.approx(2 * float(narrow.activations), rel=0.1)
