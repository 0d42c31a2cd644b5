"""The memory that a user's own module will take on a rank, known before anything is sharded."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from shardwright.api.shown import Shown
from shardwright.config.base import PlanError
from shardwright.config.plain_values import plain
from shardwright.config.plan import PlanSpec
from shardwright.config.text_columns import aligned
from shardwright.config.units import counted, memory_text
from shardwright.memory.module_account import ModuleAccount, module_account
from shardwright.parallel.zero.module_units import kind_faults, module_units, parameter_faults, unit_faults
from shardwright.sharding.memory_account import RankMemory
from shardwright.train.own_module.module_job import SUBJECT, module_job

_KINDS = ("parameters", "gradients", "optimizer", "host")


@dataclass(frozen=True, repr=False)
class ModuleMemory(Shown):
    """A rank's part of a module, by unit. Parameters, gradients and optimizer state are exact; buffers are the most
    that a step borrows at once. Activations are left out: they are unknown without a run."""

    account: ModuleAccount
    num_ranks: int
    buffer_bytes: int  # of the module's own buffers, such as running statistics; every rank has all of them

    @property
    def memory(self) -> RankMemory:
        """The memory of a rank: the sum over the units, and the most that is borrowed at once."""
        return self.account.memory

    @property
    def text(self) -> str:
        rows = [["unit", "elements", *_KINDS]]
        for row in self.rows():
            rows.append([row["unit"], f"{row['elements']:,}", *(memory_text(row[f"{kind}_bytes"]) for kind in _KINDS)])
        which = f"One of {counted(self.num_ranks, 'rank')}" if self.num_ranks > 1 else "The rank"
        total_text = f"{which} will hold {self.memory}; activations are not in it."
        buffers_text = f" The module's own buffers are {memory_text(self.buffer_bytes)}." if self.buffer_bytes else ""
        return f"{total_text}{buffers_text}\n\n{aligned(rows)}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "num_ranks": self.num_ranks,
            **self.memory.as_dict(),
            "module_buffer_bytes": self.buffer_bytes,
            "units": self.rows(),
        }

    def rows(self) -> list[dict[str, Any]]:
        """The state of each unit: its first and last parameter, and bytes by kind."""
        return [
            {
                "unit": unit.names[0] if len(unit.names) == 1 else f"{unit.names[0]} to {unit.names[-1]}",
                "elements": unit.num_elements,
                **{name: value for name, value in asdict(unit.memory).items() if name.removesuffix("_bytes") in _KINDS},
            }
            for unit in self.account.units
        ]


def memory_of(
    module: nn.Module,
    plan: Mapping[str, Any] | PlanSpec | None = None,
    *,
    optimizer: Mapping[str, Any] | None = None,
    precision: Mapping[str, Any] | None = None,
    units: Sequence[str] | None = None,
) -> ModuleMemory:
    """The memory that a rank will hold of a module under `shard(module, plan, ...)`. The module does not change. It
    may be on the meta device, without values. Raises PlanError with every fault for which `shard` would refuse it.

    >>> from torch import nn
    >>> module_memory = memory_of(nn.Linear(8, 8, bias=False), {"dp": 4, "zero": 3})
    >>> module_memory.memory.parameters_bytes, module_memory.memory.optimizer_bytes
    (64, 128)
    """
    if faults := kind_faults(module):
        raise PlanError(SUBJECT, faults)
    faults = [*parameter_faults(module, may_be_meta=True), *unit_faults(module, units)]
    dp = plan.dp if isinstance(plan, PlanSpec) else plain(plan.get("dp", 1)) if isinstance(plan, Mapping) else 1
    try:
        job = module_job(plan, optimizer, precision, dp if isinstance(dp, int) else 1)
    except PlanError as error:
        raise PlanError(SUBJECT, error.faults + faults, error.way_out) from None
    if faults:
        raise PlanError(SUBJECT, faults)
    split_module = module_units(module, units)
    in_16_bits = job.precision.compute != "float32"
    regions = {
        name: [split_module.place(parameter, in_16_bits) for parameter in parameters]
        for name, parameters in split_module.regions.items()
    }
    buffer_bytes = sum(buffer.nbytes for buffer in module.buffers())
    return ModuleMemory(module_account(job, regions), job.plan.dp, buffer_bytes)
