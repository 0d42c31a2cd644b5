"""Operators of a layer of transformers that launch kernels, counted as torch dispatches them."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from shardwright.config.software import software_of

# Operators that give a view, allocate alone, or answer the host.
_NO_KERNEL = {
    *(
        "view",
        "t",
        "transpose",
        "expand",
        "slice",
        "select",
        "unsqueeze",
        "squeeze",
        "permute",
        "detach",
        "alias",
        "split",
    ),
    *("split_with_sizes", "chunk", "_unsafe_view", "as_strided", "unbind", "empty", "empty_like", "new_empty"),
    *("empty_strided", "lift_fresh", "item", "_local_scalar_dense", "is_same_size", "result_type", "_reshape_alias"),
}
_SIZES = {
    "vocab_size": 512, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 256, "max_position_embeddings": 128,
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts operators that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.names[name] += name not in _NO_KERNEL
        return func(*args, **(kwargs or {}))


def launches_of(model_class: Callable[..., Any], config_class: Callable[..., Any], **fields: object) -> tuple[int, int]:
    """Operators (forward, backward) of a layer: of two layers less those of one."""
    counts = []
    for num_layers in (1, 2):
        config = config_class(num_hidden_layers=num_layers, **_SIZES, **fields)
        if "num_experts" in fields:
            config._experts_implementation = "grouped_mm"  # as on a device
        model = model_class(config).to(torch.bfloat16)
        ids = torch.zeros(1, 64, dtype=torch.long)
        with Launches() as forward:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        with Launches() as backward:
            loss.backward()
        counts.append((sum(forward.names.values()), sum(backward.names.values())))
    (one_forward, one_backward), (two_forward, two_backward) = counts
    return two_forward - one_forward, two_backward - one_backward


def test_launches_of_a_layer_of_head_norms_and_of_experts() -> None:
    """To the launch, but for attention, which is one operator of a CPU in each direction, and the sums in its place."""
    llama = launches_of(LlamaForCausalLM, LlamaConfig)
    dense = launches_of(Qwen3ForCausalLM, Qwen3Config)
    experts = launches_of(
        Qwen3MoeForCausalLM, Qwen3MoeConfig, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2
    )
    software = software_of("transformers-2026")
    assert llama[0] == software.kernels[0] and 0 <= software.kernels[1] - llama[1] <= 6
    assert tuple(b - a for a, b in zip(llama, dense, strict=True)) == software.head_norm_kernels
    assert tuple(b - a for a, b in zip(dense, experts, strict=True)) == software.routing_kernels
