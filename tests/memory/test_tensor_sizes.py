"""The layout table and the formulas of sizes say the same of each tensor; a label belongs to one tensor."""

from collections import Counter
from dataclasses import fields
from math import prod
from typing import Any

import pytest

from shardwright.layers.layer_tensors import (
    ATTENTION,
    BLOCK,
    ENDS,
    EXPERT_MLP,
    LATENT,
    MLP,
    ROUTING,
    SHARED_MLP,
    LayerTensor,
    ShardedTensor,
)
from shardwright.memory.kept_tensors import Share
from shardwright.memory.moe_activations import expected_rows
from shardwright.memory.tensor_table import layouts
from support.cases import small_job
from support.local_shapes import local_shape


def layer_tensors() -> list[LayerTensor]:
    """All tensors that operators take and give, and the gathered ones."""
    groups: tuple[Any, ...] = BLOCK, ATTENTION, LATENT, MLP, EXPERT_MLP, SHARED_MLP, ROUTING, ENDS
    tensors: list[LayerTensor] = [getattr(group, field.name) for group in groups for field in fields(group)]
    return tensors + [tensor.gathered for tensor in tensors if isinstance(tensor, ShardedTensor)]


def test_a_label_is_of_one_tensor() -> None:
    labels = Counter(tensor.label for tensor in layer_tensors())
    assert [label for label, number in labels.items() if number > 1] == []


PLANS: list[dict[str, Any]] = [
    {}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"cp": 2, "dp": 2}, {"cp": 2, "cp_method": "ulysses"},
]  # fmt: skip
EXPERT_PLANS: list[dict[str, Any]] = [
    {"dp": 2, "ep": 2}, {"tp": 2, "expert_tp": 1, "ep": 2, "sequence_parallel": True},
    {"tp": 2, "expert_tp": 2, "sequence_parallel": True},
]  # fmt: skip
KINDS = ("llama", "gpt", "latent", "latent-plain-queries", "around", "one-norm", "two-norms", "llama-mtp")
EXPERT_KINDS = ("mixtral", "deepseek", "qwen-moe", "plain-input")


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        (kind, plan)
        for kind in KINDS
        for plan in PLANS
        if kind not in ("latent", "latent-plain-queries") or "cp" not in plan
    ]
    + [(kind, plan) for kind in EXPERT_KINDS for plan in PLANS[:3] + EXPERT_PLANS],
)
def test_the_table_and_the_formulas_have_the_same_sizes(kind: str, plan: dict[str, Any]) -> None:
    job = small_job(kind, microbatch_size=2, **plan)
    job = job.model_copy(update={"model": job.model.model_copy(update={"vocab": 64})})
    rows = [expected_rows(job)] if job.model.moe.experts else []
    sizes, by_label = Share.of(job, *rows).tensors, {tensor.label: tensor for tensor in layer_tensors()}
    compared = 0
    for region in layouts(job):
        for layout in region.activations:
            elements = sizes[by_label[layout.name]]
            assert elements == prod(local_shape(layout, "value", {})), layout.name
            compared += 1
    assert compared >= 15
