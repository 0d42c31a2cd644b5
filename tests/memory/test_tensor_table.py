"""The layout table is what ranks hold: local shapes, and values that put together are those of one rank."""

from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from shardwright.config.job import JobSpec
from shardwright.memory.tensor_table import RegionLayout, layouts
from shardwright.model import embedding
from shardwright.model.decoder import Block
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor import linear as tensor_parallel
from shardwright.parallel.tensor.parameter import placed_parameters
from shardwright.sharding.placements import BUFFER, TensorLayout
from shardwright.train.build import build
from shardwright.train.train_step import train_step
from support.cases import made_up_tokens, small_job
from support.local_shapes import local_shape
from support.ranks import run_on_mesh

Arrays = dict[str, np.ndarray]


def seen(mesh: Mesh, job: JobSpec) -> tuple[Arrays, dict[str, tuple[int, ...]], dict[str, int]]:
    """Outputs of layer 0, the embedding and the head in the first microbatch of a step, with gradients where autograd
    has them; shapes of parameters; and where this rank stands."""
    replica = build(job, mesh)
    results: Arrays = {}

    def keep(name: str, value: torch.Tensor) -> torch.Tensor:
        if name not in results:
            results[name] = value.detach().numpy().copy()
            if value.requires_grad:
                value.register_hook(lambda grad: results.__setitem__(f"{name}'", grad.numpy().copy()))
        return value

    def watch(owner: Any, method: str, name: str) -> None:
        before: Callable[..., torch.Tensor] = getattr(owner, method)
        object.__setattr__(owner, method, lambda *args, **more: keep(name, before(*args, **more)))

    for stage in replica.stages.values():
        if stage.embedding is not None:
            watch(stage.embedding, "forward", "embedding/input")
        for block in (layer for name, layer in stage.layers.items() if name == "0"):
            assert isinstance(block, Block)
            watch(block.attention_norm, "forward", "layer/attention normal")
            watch(block.attention, "project", "layer/qkv")
            watch(block.attention, "attend", "layer/attended")
            watch(block.mlp_norm, "forward", "layer/mlp normal")
            if block.mlp is not None:
                watch(block.mlp.up, "forward", "layer/up")
                watch(block.mlp, "activate", "layer/inner")
            if block.moe is not None:
                watch(block.moe.experts, "forward", "layer/expert output")
            watch(block, "forward", "layer/output")
        if stage.norm is not None:
            watch(stage.norm, "forward", "head/final normal")
            watch(stage, "logits", "head/logits")
    share = job.batch.global_batch_size // job.plan.dp

    def watch_sums(module: ModuleType, *names: str) -> ExitStack:
        """Keep the results of the first row-parallel products of a module, before their sum."""
        left, patches = list(names), ExitStack()
        for function in ("reduce_from", "scatter_to"):
            before = getattr(module, function)

            def watched(x: torch.Tensor, axis: Any, before: Any = before) -> torch.Tensor:
                return before(keep(left.pop(0), x) if left else x, axis)

            patches.enter_context(patch.object(module, function, watched))
        return patches

    blocks = [stage.layers["0"] for stage in replica.stages.values() if "0" in stage.layers]
    rows = ["layer/output product", *(["layer/down product"] if blocks and blocks[0].mlp is not None else [])]
    with watch_sums(tensor_parallel, *(rows if blocks else [])), watch_sums(embedding, "embedding/looked-up rows"):
        train_step(replica, 0, made_up_tokens(job, 0)[mesh.dp.index * share :][:share])
    held = [p for stage in replica.stages.values() for p in placed_parameters(stage).values()]
    axes = {"dp": mesh.dp, "cp": mesh.cp, "tp": mesh.tp, "ep": mesh.ep, "etp": mesh.expert_tp}
    return results, {p.place.name: tuple(p.shape) for p in held}, {name: axis.index for name, axis in axes.items()}


def regions_of(job: JobSpec) -> dict[str, RegionLayout]:
    return {region.name: region for region in layouts(job)}


def tensor(regions: dict[str, RegionLayout], name: str) -> TensorLayout:
    region, tensor = name.split("/")
    region = "layer with experts" if region == "layer" and "layer" not in regions else region
    return next(t for t in regions[region].activations if t.name == tensor)


def put_together(layout: TensorLayout, state: str, parts: list[np.ndarray]) -> np.ndarray:
    """The whole tensor from those of the ranks of a tp line: cut, replicated or summed as the table says."""
    of_tp = next(p for p in layout.states[state] if p.axis == "tp")
    if of_tp.kind == "shard":
        return np.concatenate(parts, axis=of_tp.dim)
    if of_tp.kind == "partial":
        return np.sum(parts, axis=0)
    for part in parts[1:]:
        np.testing.assert_allclose(part, parts[0], atol=1e-6)
    return parts[0]


PLANS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "sp": {"tp": 2, "sequence_parallel": True},
    "sp-pp-dp": {"tp": 2, "sequence_parallel": True, "pp": 2, "dp": 2, "zero": 1},
}


@pytest.mark.parametrize(
    ("kind", "plan"), [("llama", "tp"), ("llama", "sp-pp-dp"), ("gpt", "sp"), ("latent", "tp"), ("latent", "sp")]
)
def test_parts_put_together_are_those_of_one_rank(kind: str, plan: str) -> None:
    job = small_job(kind, microbatch_size=2, **PLANS[plan])
    regions = regions_of(job)
    (whole, _, _), *_ = run_on_mesh(job.as_one_rank(), seen, job.as_one_rank())
    ranks = run_on_mesh(job, seen, job)
    first_replica = [ranks[pp * job.plan.dp * job.plan.tp :][: job.plan.tp] for pp in range(job.plan.pp)]
    compared = 0
    for name, expected in whole.items():
        line = next(line for line in first_replica if name in line[0][0])
        parts = [result[name] for result, _, _ in line]
        if name.startswith("layer/qkv") and kind == "latent":
            name = name.replace("qkv", "latents")
        layout = tensor(regions, name.removesuffix("'"))
        state = "gradient" if name.endswith("'") else "value"
        for index, part in enumerate(parts):
            local = local_shape(layout, state, {"tp": index})
            assert part.size == np.prod(local) and part.shape[:2] == local[:2], name
        shape = [2 if d == "batch" else n for d, n in zip(layout.dims, layout.shape, strict=True)]
        shaped = [part.reshape(local_shape(layout, state, {"tp": index})) for index, part in enumerate(parts)]
        np.testing.assert_allclose(
            put_together(layout, state, shaped), expected.reshape(shape), rtol=1e-4, atol=1e-6, err_msg=name
        )
        compared += 1
    assert compared >= 16


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("llama", {"dp": 2, "cp": 2}),
        ("llama", {"cp": 2, "tp": 2, "sequence_parallel": True}),
        ("qwen", {"cp": 2, "cp_method": "ulysses", "dp": 2}),
        ("llama-tied", {"dp": 2, "zero": 3, "pp": 2}),
        ("mixtral", {"dp": 2, "tp": 2, "ep": 2, "sequence_parallel": True}),
        ("mixtral", {"tp": 2, "ep": 2, "expert_tp": 1, "sequence_parallel": True}),
    ],
)
def test_shapes_are_those_of_ranks(kind: str, plan: dict[str, Any]) -> None:
    job = small_job(kind, microbatch_size=2, **plan)
    regions = regions_of(job)
    tables = {t.name: t for region in regions.values() for t in region.parameters}
    num_rows = 0
    for result, parameters, index in run_on_mesh(job, seen, job):
        for name, value in result.items():
            layout, state = tensor(regions, name.removesuffix("'")), "gradient" if name.endswith("'") else "value"
            local = local_shape(layout, state, index)
            if layout.rows_vary:
                assert value.shape[1:] == local[1:], name
                num_rows += len(value) if name == "layer/expert output" else 0
            else:
                assert value.shape[:2] == local[:2] and value.size == np.prod(local), name
        for name, shape in parameters.items():
            if not name.startswith(("layers.1.", "layers.2.", "layers.3.")):
                assert shape == local_shape(tables[name.removeprefix("layers.0.")], "in use", index), name
    if "layer with experts" in regions:
        assert num_rows == tensor(regions, "layer/expert output").shape[0] * job.plan.expert_tp_size


def test_zero_shards_what_it_says() -> None:
    """Rajbhandari et al. 2020 (arXiv 1910.02054, figure 1): what is cut over the replicas in each stage."""
    cut = {
        0: (), 1: ("summed gradient", "optimizer"), 2: ("summed gradient", "optimizer"),
        3: ("between uses", "summed gradient", "optimizer"),
    }  # fmt: skip
    for zero, expected in cut.items():
        job = small_job("llama", dp=4, tp=2, sequence_parallel=True, zero=zero)
        for layout in (t for region in regions_of(job).values() for t in region.parameters):
            of_dp = {state: next(p for p in results if p.axis == "dp") for state, results in layout.states.items()}
            assert tuple(s for s, p in of_dp.items() if p.kind == "shard" and p.dim == BUFFER) == expected
            assert of_dp["in use"].kind == "replicate"
            assert of_dp["gradient"].kind == "partial"


def test_notations() -> None:
    regions = regions_of(small_job("llama", dp=2, tp=2, cp=2, sequence_parallel=True, zero=1))
    by_name = {t.name: t for region in regions.values() for t in (*region.parameters, *region.activations)}

    def said(name: str, state: str) -> tuple[list[str], list[str], str]:
        layout = by_name[name]
        return [p.dtensor for p in layout.states[state]], [p.sbp for p in layout.states[state]], layout.gspmd(state)

    assert said("attention.qkv.weight", "in use") == (["Replicate()", "Shard(0)"], ["B", "S(0)"], "[tp, -, -, -]")
    assert said("mlp.down.weight", "gradient") == (["Partial()", "Shard(1)"], ["P", "S(1)"], "[-, tp] unreduced dp cp")
    assert said("mlp_norm.weight", "gradient")[1] == ["P", "P"]
    assert said("mlp_norm.weight", "optimizer")[2] == "[-] buffer dp cp"
    assert said("input", "value")[1:] == (["S(1)", "S(0)", "S(0)"], "[cp+tp, dp, -]")
    assert said("down product", "value")[1:] == (["S(1)", "S(0)", "P"], "[cp, dp, -] unreduced tp")
    assert said("mlp normal, at the product", "gradient")[1] == ["S(1)", "S(0)", "P"]
