"""Private and fused operators get what their kernels demand, and what is put in is told."""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from shardwright.config.float8_facts import FLOAT8_RECIPES
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.measure.checks.kernel_demands import DEMANDS, CheckedCalls, bound, call_faults, checked_step
from shardwright.precision.float8 import E4M3, Quantised, quantise, transposed
from shardwright.precision.scaled_mm import scaled_grouped_product, scaled_product
from shardwright.train.build import build, job_mesh
from shardwright.train.dry_steps import DrySteps
from shardwright.train.train_step import train_step
from support.cases import small_job

NUM_PLANTED = 40
JOBS = {
    "llama": small_job("llama", batch=4),
    "windows": small_job("gpt-oss", batch=4, microbatch_size=2),
    "alibi": small_job("bloom", batch=4, microbatch_size=2),
    "chunks": small_job("llama4", batch=4, microbatch_size=2),
    "experts": small_job("mixtral", batch=4),
    "tp": small_job("qwen", batch=4, tp=2, sequence_parallel=True),
    "pp": small_job("llama", batch=8, pp=2, schedule="zb-h1"),
}
FLOAT8 = [(recipe, kind) for recipe in FLOAT8_RECIPES.names if recipe != "none" for kind in ("llama", "mixtral")]
NAMES = sorted({operator for demand in DEMANDS for operator in demand.operators})


def in_bf16(job: JobSpec) -> JobSpec:
    return job.model_copy(update={"precision": job.precision.model_copy(update={"compute": "bf16"})})


def in_float8(recipe: str, kind: str) -> JobSpec:
    """A job whose widths are whole tiles, one and four of them, with weight gradients in fp8 too."""
    fields = small_job(kind, batch=2, layers=1).model_dump(exclude_unset=True)
    wide = fields["model"] | {"hidden": 128, "ffn": 512}
    if "moe" in wide:
        wide["moe"] |= {"ffn": 512}
    precision = {"compute": "bf16", "float8": recipe, "float8_weight_gradients": True}
    return make_job(fields | {"model": wide, "precision": precision})


@pytest.mark.parametrize(("recipe", "kind"), FLOAT8)
def test_every_product_in_fp8_is_as_its_kernel_demands(recipe: str, kind: str) -> None:
    checked = checked_step(in_float8(recipe, kind), 0)
    assert checked.calls["aten::_scaled_mm_v2"] > 10 and list(checked.faults) == []


def grouped_in_float8(keep: Callable[[str, Any], None]) -> list[str]:
    """The faults of a grouped product in fp8: of two matrices, one of which gets no rows."""
    x = Quantised(torch.empty(6, 32, dtype=E4M3, device="meta"), torch.empty(6, 1, device="meta"), "row")
    values, scales = torch.empty(2, 48, 32, dtype=E4M3, device="meta"), torch.empty(2, 48, 1, device="meta")
    weights = [Quantised(*one, "row") for one in zip(values, scales, strict=True)]
    with CheckedCalls(keep) as checked, pytest.raises(NotImplementedError):  # torch has no shapes of its results
        scaled_grouped_product(x, weights, [(0, slice(0, 6))])
    return list(checked.faults)


def test_a_grouped_product_in_fp8_is_as_its_kernel_demands() -> None:
    assert grouped_in_float8(lambda name, arguments: None) == []


@pytest.mark.parametrize("num_rows", [1, 2, 16])
@pytest.mark.parametrize("num_tiles", [1, 3, 4])
def test_scales_of_tiles_and_blocks_lie_as_kernels_read_them(num_rows: int, num_tiles: int) -> None:
    """Also where a single row has them, and where those of a transposed matrix need no padding."""
    x = quantise(torch.empty(num_rows, 128 * num_tiles, dtype=torch.bfloat16, device="meta"), "tile", E4M3)
    weight = quantise(torch.empty(128 * num_tiles, 256, dtype=torch.bfloat16, device="meta"), "block", E4M3)
    with CheckedCalls() as checked:
        assert scaled_product(x, transposed(weight), torch.bfloat16).shape == (num_rows, 256)
    assert checked.calls and not checked.faults


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("number", ["float32", "bf16"])
def test_every_call_is_as_its_kernel_demands(name: str, number: str) -> None:
    job = in_bf16(JOBS[name]) if number == "bf16" else JOBS[name]
    for rank in range(0, job.plan.world, max(1, job.plan.world // job.plan.pp)):
        checked = checked_step(job, rank)
        assert sum(checked.calls.values()) > 0 and list(checked.faults) == []


def test_updates_are_as_their_kernels_demand() -> None:
    """A dry step leaves them out, and a step on a CPU has them."""
    for optimizer, operator in (("adamw", "_fused_adamw_"), ("adam", "_fused_adam_"), ("sgd", "_fused_sgd_")):
        job = small_job(batch=2)
        job = job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"name": optimizer})})
        mesh = job_mesh(job, 0, torch.device("cpu"))
        replica = build(job, mesh)
        with CheckedCalls() as checked:
            train_step(replica, 0, torch.randint(61, (2, 17)))
        assert checked.calls[f"aten::{operator}"] > 0 and not checked.faults


Calls = dict[str, list[dict[str, Any]]]


@cache
def real_calls() -> Calls:
    """Calls of each operator as ranks make them, and of updates."""
    calls: Calls = {}

    def keep(name: str, given: Any) -> None:
        calls.setdefault(name, []).append(dict(given))

    for job in [*(in_bf16(job) for job in JOBS.values()), *(in_float8(recipe, "llama") for recipe, _ in FLOAT8)]:
        steps = DrySteps(job, 0, "cuda")
        with CheckedCalls(keep):
            steps.run()
    grouped_in_float8(keep)
    weight = torch.empty(8, device="meta")
    lists = [[torch.empty_like(weight)] for _ in range(4)]
    numbers = {
        "lr": 0.1,
        "beta1": 0.9,
        "beta2": 0.9,
        "weight_decay": 0.0,
        "eps": 1e-8,
        "amsgrad": False,
        "maximize": False,
    }
    steps_done = [torch.zeros((), device="meta")]
    operator = torch.ops.aten._fused_adamw_.default
    keep("aten::_fused_adamw_", bound(operator, (lists[0], lists[1], lists[2], lists[3], [], steps_done), numbers))
    return calls


def of_another_number(rng: random.Random, x: Tensor) -> Tensor:
    """Numbers that no kernel takes there."""
    return torch.empty_strided(x.shape, x.stride(), dtype=torch.float64, device="meta")


def turned(rng: random.Random, x: Tensor) -> Tensor:
    """The last dim is the slowest in memory."""
    order = [x.ndim - 1, *range(x.ndim - 1)]
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(x.ndim)])


def off_its_load(rng: random.Random, x: Tensor) -> Tensor:
    """Rows that begin an element further."""
    wide = torch.empty(*x.shape[:-1], x.shape[-1] + 1, dtype=x.dtype, device="meta")
    return wide[..., :-1]


def first_of(plant: Callable[[random.Random, Tensor], Tensor]) -> Callable[[random.Random, Any], Any]:
    """A list with another first tensor."""
    return lambda rng, tensors: [plant(rng, tensors[0]), *tensors[1:]]


def without_its_last(rng: random.Random, x: Tensor) -> Tensor:
    """A row or an element less."""
    return x[:-1] if x.ndim else torch.empty(2, dtype=x.dtype, device="meta")


ATTENTION = "aten::_scaled_dot_product_efficient_attention"
CAUSAL = "aten::_scaled_dot_product_flash_attention"
SCALED, GROUPED, NORMS = "aten::_scaled_mm_v2", "aten::_scaled_grouped_mm_v2", "aten::_foreach_norm.Scalar"
PLANTS: list[tuple[str, str, Callable[[random.Random, Any], Any]]] = [
    (CAUSAL, "query", of_another_number), (CAUSAL, "value", turned), (CAUSAL, "key", lambda rng, x: x[..., :-1]),
    (f"{CAUSAL}_backward", "grad_out", of_another_number), (f"{CAUSAL}_backward", "out", turned),
    (SCALED, "self", of_another_number), (SCALED, "self", turned), (SCALED, "mat2", lambda rng, x: x.contiguous()),
    (SCALED, "mat2", lambda rng, x: x[:, :-1]), (SCALED, "scale_a", first_of(of_another_number)),
    (SCALED, "scale_b", first_of(lambda rng, x: torch.empty(3, 7, device="meta"))),
    (SCALED, "recipe_b", lambda rng, recipes: [ScalingType.BlockWise1x32.value]),
    (GROUPED, "self", of_another_number), (GROUPED, "self", lambda rng, x: x[:0]),
    (GROUPED, "mat2", lambda rng, x: x.contiguous()), (GROUPED, "offs", lambda rng, x: x.long()),
    (GROUPED, "scale_a", first_of(without_its_last)), (GROUPED, "scale_b", first_of(without_its_last)),
    (GROUPED, "out_dtype", lambda rng, number: torch.float32), (GROUPED, "recipe_a", lambda rng, recipes: [0]),
    (NORMS, "ord", lambda rng, order: 3), (NORMS, "self", first_of(of_another_number)),
    (NORMS, "self", first_of(lambda rng, x: x[:0])),
    (NORMS, "self", first_of(lambda rng, x: torch.empty(8, dtype=x.dtype, device="meta")[::2])),
    (ATTENTION, "query", of_another_number), (ATTENTION, "value", of_another_number), (ATTENTION, "key", turned),
    (ATTENTION, "attn_bias", off_its_load),
    (f"{ATTENTION}_backward", "grad_out_", turned), (f"{ATTENTION}_backward", "logsumexp", off_its_load),
    (f"{ATTENTION}_backward", "logsumexp", of_another_number),
    (f"{ATTENTION}_backward", "out", lambda rng, x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)),
    (f"{ATTENTION}_backward", "out", lambda rng, x: torch.empty(x.shape, dtype=x.dtype, device="meta")),
    ("aten::_grouped_mm", "self", of_another_number), ("aten::_grouped_mm", "mat2", off_its_load),
    ("aten::_grouped_mm", "offs", lambda rng, x: x.long()), ("aten::_grouped_mm", "self", lambda rng, x: x[:0]),
    ("aten::mm.dtype_out", "self", of_another_number), ("aten::addmm.dtype_out", "out", of_another_number),
    ("aten::addmm.dtype_out", "mat2", of_another_number), ("aten::mm.dtype_out", "mat2", of_another_number),
    ("shardwright::rms_norm", "x", of_another_number), ("shardwright::rms_norm_backward", "inverse", of_another_number),
    ("shardwright::rms_norm_backward", "inverse", lambda rng, x: x[:1]),
]  # fmt: skip


@pytest.mark.parametrize("which", range(len(PLANTS)))
def test_what_is_put_in_is_told(which: int) -> None:
    name, argument, plant = PLANTS[which]
    rng, answer = random.Random(which), 0
    calls = [call for call in real_calls()[name] if call[argument] is not None]
    if argument == "out" and name.startswith(ATTENTION):  # a single row is nowhere apart from another
        calls = [call for call in calls if call["out"].shape[2] > 1]
    for _ in range(NUM_PLANTED):
        call = rng.choice(calls)
        assert call_faults(name, call) == []
        answer += bool(call_faults(name, call | {argument: plant(rng, call[argument])}))
    assert answer == NUM_PLANTED


@pytest.mark.parametrize(
    "changed",
    [
        lambda given: {"grads": [given["grads"][0].bfloat16()]}, lambda given: {"exp_avgs": []},
        lambda given: {"state_steps": [torch.zeros((), dtype=torch.int64, device="meta")]},
        lambda given: {"self": [torch.empty(16, device="meta")[::2]]},
    ],
)  # fmt: skip
def test_what_is_put_in_an_update_is_told(changed: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    (given,) = real_calls()["aten::_fused_adamw_"]
    assert call_faults("aten::_fused_adamw_", given) == []
    (fault, *_) = call_faults("aten::_fused_adamw_", given | changed(given))
    assert fault.endswith("which the fused kernels ask)")


def test_every_operator_is_there_under_its_name() -> None:
    """In the torch that is installed."""
    for name in NAMES:
        namespace, rest = name.split("::")
        packet, _, overload = rest.partition(".")
        assert (overload or "default") in getattr(getattr(torch.ops, namespace), packet).overloads()
