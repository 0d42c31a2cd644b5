"""The systems that benchmarks/zero.py compares: each is a training step of the same model, made by its name.

All take the samples of both ranks, [2 B, S + 1]. Baselines and ours of dp 2 compute those of their own rank, one
microbatch after another; others of ours all of them, as their plan says. All sum gradients over both ranks, clip by the
global norm, update by fused AdamW with decay for matrices alone, and give the mean loss of both ranks.
"""

import importlib.util
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from alternate import WORLD, resized
from plain_model import PlainDecoder, plain_decoder
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardwright.config.job import JobSpec
from shardwright.config.plan import PlanSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.train.build import build, job_mesh
from shardwright.train.train_step import train_step

# Our variants: fields of the plan. Those that the plan does not have yet are left out with a line.
_LEAN = {"recompute": "selective", "recompute_operators": ("norm", "activation")}
OURS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours ZeRO 1": {"zero": 1},
    "ours ZeRO 2": {"zero": 2},
    "ours ZeRO 3": {"zero": 3},
    "ours lean": _LEAN,
    "ours lean ZeRO 1": _LEAN | {"zero": 1},
    "ours lean ZeRO 2": _LEAN | {"zero": 2},
    "ours lean ZeRO 3": _LEAN | {"zero": 3},
    "ours lean tp 2": _LEAN | {"dp": 1, "tp": 2, "sequence_parallel": True},
    "ours lean pp 2": _LEAN | {"dp": 1, "pp": 2},
    "ours lean cp 2": _LEAN | {"dp": 1, "cp": 2, "zero": 1},
}
REFERENCE = "DDP"
CPU = torch.device("cpu")
Step = Callable[[Tensor], tuple[float, float]]  # the mean loss, and the gradient norm or NaN where it is not told


@dataclass(frozen=True)
class Setting:
    """The parts that a system is made from. Without `weights` (names of the plain model) a baseline draws its own."""

    job: JobSpec
    mesh: Mesh
    weights: dict[str, Tensor] | None = None

    def parts(self, tokens_BS: Tensor) -> tuple[Tensor, ...]:
        """The microbatches of this rank, of both ranks' samples."""
        return tokens_BS.chunk(WORLD)[self.mesh.rank].split(self.job.plan.microbatch_size)

    def adamw(self, model: nn.Module) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Groups and options of the optimizer."""
        spec = self.job.optimizer
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": spec.weight_decay},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ]
        options = {"lr": spec.learning_rate, "betas": (spec.beta1, spec.beta2), "eps": spec.epsilon}
        return groups, options


def why_not(name: str) -> str | None:
    """Why a system can't run here, if so."""
    unknown = [field for field in OURS.get(name, {}) if field not in PlanSpec.model_fields]
    if unknown:
        return f"the plan has no field {unknown[0]}"
    if name.startswith("DeepSpeed") and importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    return None


def make_system(name: str, setting: Setting) -> Step:
    """A system's step. Both ranks call this."""
    if name in OURS:
        return _ours(OURS[name], setting)
    return BASELINES[name](setting)


def _ours(fields: dict[str, Any], setting: Setting) -> Step:
    job = resized(setting.job, plan=fields)
    mesh = setting.mesh if job.plan.dp == WORLD else job_mesh(job, setting.mesh.rank, CPU, setting.mesh.watch)
    replica = build(job, mesh)

    def step(tokens_BS: Tensor) -> tuple[float, float]:
        mine_BS = tokens_BS.chunk(job.plan.dp)[mesh.dp.index]
        result = train_step(replica, 0, mine_BS)
        return result.loss, result.grad_norm or 0.0

    return step


def _torch_step(
    setting: Setting, model: nn.Module, optimizer: torch.optim.Optimizer, alone: Callable[[bool], Any]
) -> Step:
    """A step as torch's manuals write it. `alone(is_last)` is a context for the passes of one microbatch."""
    clip = setting.job.optimizer.clip_grad_norm

    def step(tokens_BS: Tensor) -> tuple[float, float]:
        parts = setting.parts(tokens_BS)
        total = torch.zeros((), dtype=torch.float64)
        optimizer.zero_grad(set_to_none=True)
        for index, part in enumerate(parts):
            with alone(index == len(parts) - 1):
                loss = model(part)
                (loss / len(parts)).backward()
            total += loss.detach()
        norm = torch.tensor(torch.nan)
        if clip > 0:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        dist.all_reduce(total)
        return total.item() / (len(parts) * setting.job.plan.dp), norm.item()

    return step


def _wrapped(setting: Setting, model: nn.Module) -> DistributedDataParallel:
    # There are no buffers to send, and gradients are reduced where they lie. That the graph never changes can't be
    # said where microbatches accumulate: the first `no_sync` then fails in torch 2.13.
    return DistributedDataParallel(
        model, gradient_as_bucket_view=True, static_graph=setting.job.num_microbatches == 1,
        forward_sync_buffers=False, bucket_cap_mb=setting.job.plan.bucket_mib,
    )  # fmt: skip


def _alone(model: DistributedDataParallel, is_last: bool) -> Any:
    return nullcontext() if is_last else model.no_sync()


def _ddp(setting: Setting, compiled: bool = False) -> Step:
    plain = plain_decoder(setting.job.model, setting.weights)
    if compiled:
        plain.compile_layers()
    model = _wrapped(setting, plain)
    groups, options = setting.adamw(model)
    return _torch_step(setting, model, torch.optim.AdamW(groups, fused=True, **options), partial(_alone, model))


def _zero_redundancy(setting: Setting, as_view: bool) -> Step:
    model = _wrapped(setting, plain_decoder(setting.job.model, setting.weights))
    groups, options = setting.adamw(model)
    optimizer = ZeroRedundancyOptimizer(
        groups, torch.optim.AdamW, parameters_as_bucket_view=as_view, fused=True, **options
    )
    return _torch_step(setting, model, optimizer, partial(_alone, model))


def _fsdp2(setting: Setting, reshard: bool, compiled: bool = False) -> Step:
    model = plain_decoder(setting.job.model, setting.weights)
    if compiled:
        model.compile_layers()
    mesh = DeviceMesh("cpu", list(setting.mesh.dp.ranks))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)  # its backward begins at once
    groups, options = setting.adamw(model)

    def alone(is_last: bool) -> Any:
        model.set_requires_gradient_sync(is_last)
        return nullcontext()

    return _torch_step(setting, model, torch.optim.AdamW(groups, fused=True, **options), alone)


def _deepspeed(setting: Setting, stage: int, offload: bool = False) -> Step:
    import deepspeed  # optional, and slow to import

    job = setting.job
    os.environ["LOCAL_RANK"] = str(setting.mesh.rank)  # it asks no process group
    model: PlainDecoder = plain_decoder(job.model, setting.weights)
    groups, options = setting.adamw(model)
    zero = {"stage": stage, "contiguous_gradients": True, "overlap_comm": False}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    config = {
        "train_micro_batch_size_per_gpu": job.plan.microbatch_size,
        "gradient_accumulation_steps": job.num_microbatches,
        "gradient_clipping": job.optimizer.clip_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], fused=True, **options)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def step(tokens_BS: Tensor) -> tuple[float, float]:
        parts = setting.parts(tokens_BS)
        total = torch.zeros((), dtype=torch.float64)
        for part in parts:
            loss = engine(part)
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        norm = engine.get_global_grad_norm()
        return total.item() / (len(parts) * job.plan.dp), float("nan") if norm is None else float(norm)

    return step


BASELINES: dict[str, Callable[[Setting], Step]] = {
    REFERENCE: _ddp,
    "DDP compiled": partial(_ddp, compiled=True),
    "FSDP2": partial(_fsdp2, reshard=True),
    "FSDP2 compiled": partial(_fsdp2, reshard=True, compiled=True),
    "FSDP2 kept": partial(_fsdp2, reshard=False),
    "ZeroRedundancyOptimizer": partial(_zero_redundancy, as_view=False),
    "ZeroRedundancyOptimizer views": partial(_zero_redundancy, as_view=True),
    **{f"DeepSpeed ZeRO {stage}": partial(_deepspeed, stage=stage) for stage in range(4)},
    "DeepSpeed ZeRO 2 offload": partial(_deepspeed, stage=2, offload=True),
}
