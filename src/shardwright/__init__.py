"""Shardwright trains large models on clusters, and says beforehand what will happen.

    import shardwright as sw

    job = sw.load("llama3-8b", devices=64, device="h100-sxm")
    print(job.plan())
    print(job.estimate())

A name's module is imported when it is first used; only `shard`, `memory_of` and `Job.train` need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.api.loaded_job import Job as Job
    from shardwright.api.loaded_job import load as load
    from shardwright.api.memory_of import ModuleMemory as ModuleMemory
    from shardwright.api.memory_of import memory_of as memory_of
    from shardwright.config.base import PlanError as PlanError
    from shardwright.config.base import RunError as RunError
    from shardwright.train.own_module.shard import shard as shard
    from shardwright.train.own_module.sharded_module import ShardedModule as ShardedModule

__version__ = "0.1.0"

_HOMES = {
    "Job": "shardwright.api.loaded_job",
    "load": "shardwright.api.loaded_job",
    "memory_of": "shardwright.api.memory_of",
    "shard": "shardwright.train.own_module.shard",
    "ModuleMemory": "shardwright.api.memory_of",
    "ShardedModule": "shardwright.train.own_module.sharded_module",
    "PlanError": "shardwright.config.base",
    "RunError": "shardwright.config.base",
}
__all__ = ["Job", "ModuleMemory", "PlanError", "RunError", "ShardedModule", "load", "memory_of", "shard"]


def __getattr__(name: str) -> Any:
    """Import the object behind a name of the package. The way to what commands do is in the error."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    missing = f"module {__name__!r} has no attribute {name!r}"
    if not name.startswith("_") and hasattr(import_module(_HOMES["Job"]).Job, name):
        missing += f"; a job has it: {import_module('shardwright.config.package_call').call_of_job(name)}"
    raise AttributeError(missing)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
