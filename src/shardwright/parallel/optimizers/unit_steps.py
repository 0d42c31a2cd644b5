"""Steps of whole matrices in a unit, by the optimizer and the ranks that share the unit."""

import torch

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.optimizers.adafactor import Adafactor
from shardwright.parallel.optimizers.muon import Muon
from shardwright.parallel.zero.flat_unit import FlatUnit
from shardwright.parallel.zero.master_weights import MatrixSteps
from shardwright.sharding.factored_sums import FactoredSums
from shardwright.sharding.matrix_exchange import MatrixExchange
from shardwright.sharding.unit_update import UnitUpdate


def unit_steps(job: JobSpec, mesh: Mesh, update: UnitUpdate | None, unit: FlatUnit) -> MatrixSteps | None:
    """The steps of an update on this rank, with `unit` one of its units; None if each element is updated by itself."""
    shards = unit.sharding.shards
    tp = mesh.expert_tp if unit.parameters[0].place.is_expert else mesh.tp
    if isinstance(update, MatrixExchange):
        dtype = torch.float32 if update.itemsize == torch.float32.itemsize else torch.bfloat16
        return Muon(update, shards, tp, dtype, job.optimizer.newton_schulz_steps)
    return Adafactor(update, shards, tp) if isinstance(update, FactoredSums) else None
