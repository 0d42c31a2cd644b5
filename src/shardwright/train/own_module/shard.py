"""Shards a user's module according to a plan."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwright.config import largest
from shardwright.config.base import PlanError
from shardwright.config.phrase import say
from shardwright.config.plain_values import GivenOptions
from shardwright.config.plan import PlanSpec
from shardwright.parallel.zero.module_units import (
    compiled_faults,
    kind_faults,
    module_units,
    parameter_faults,
    unit_faults,
)
from shardwright.sharding.groups import zero_stage
from shardwright.train.own_module.joining import joined_mesh, num_ranks
from shardwright.train.own_module.module_job import SUBJECT, module_job
from shardwright.train.own_module.sharded_module import ShardedModule


def shard(
    module: nn.Module, plan: Mapping[str, Any] | PlanSpec | None = None, *,
    optimizer: Mapping[str, Any] | None = None, precision: Mapping[str, Any] | None = None,
    units: Sequence[str] | None = None, accumulate: int = 1, timeout_s: float = 120.0,
) -> ShardedModule:  # fmt: skip
    """Put a module of your own under data parallel and ZeRO. Every rank calls this.

    `plan`, `optimizer` and `precision` have the fields of these tables in a job; plan.dp is the number of ranks. A step
    has `accumulate` backwards. With ZeRO 3, `units` are the names of the submodules whose parameters are gathered
    together; by default the modules in repeated containers. If there is no process group, one is made from torchrun's
    environment; a rank that waits longer than `timeout_s` for others ends, and names them. The module's parameters are
    replaced in place, and begin with their values on rank 0.

    Raises PlanError with every fault.
    """
    if faults := kind_faults(module):
        raise PlanError(SUBJECT, faults)
    options = GivenOptions()
    accumulate = options.whole(say("accumulate, the backwards of a step,"), accumulate, least=1)
    timeout_s = options.number("timeout_s", timeout_s, 120.0)
    if not 0 < timeout_s <= largest.SECONDS:
        options.faults.append(
            say(
                "timeout_s is {timeout_s:g}; use seconds, from above 0 to {seconds:g}",
                timeout_s=timeout_s,
                seconds=largest.SECONDS,
            )
        )
    faults = [*parameter_faults(module), *unit_faults(module, units), *options.faults]
    try:
        job = module_job(plan, optimizer, precision, num_ranks())
    except PlanError as error:
        raise PlanError(SUBJECT, error.faults + faults, error.way_out) from None
    checked_units = module_units(module, units) if not faults else None
    if checked_units is not None and zero_stage(job.plan) == 3:
        faults += compiled_faults(checked_units, module)
    if faults or checked_units is None:
        raise PlanError(SUBJECT, faults)
    device = next(parameter.device for parameter in module.parameters())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return ShardedModule(module, checked_units, job, joined_mesh(job, device, timeout_s), accumulate)
