"""Builds what one rank runs under a plan: its stages, their sharding, the programs and the optimizer."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.config.plan import layer_policies
from shardwright.model.decoder import DecoderStage, stage_span
from shardwright.model.moe_block import Experts
from shardwright.model.router_state import RouterState
from shardwright.parallel.comm.collectives import Axis, all_reduce_max
from shardwright.parallel.comm.hang_watch import Watch
from shardwright.parallel.comm.process_groups import Mesh, MeshNeeds, StandIns, make_mesh
from shardwright.parallel.optimizers.adafactor import Adafactor
from shardwright.parallel.optimizers.muon import Muon
from shardwright.parallel.pipeline.executor import PipelineExecutor
from shardwright.parallel.recompute.offload import HostPool
from shardwright.parallel.tensor.initial_values import Initial, seeded
from shardwright.parallel.tensor.linear import ColumnLinear, LayerSharding, RowLinear
from shardwright.parallel.tensor.parameter import PlacedParameter, placed_parameters
from shardwright.parallel.zero.flat_unit import FlatUnit
from shardwright.parallel.zero.held_memory import measured_memory
from shardwright.parallel.zero.host_link import HostLink
from shardwright.parallel.zero.master_weights import MatrixSteps
from shardwright.parallel.zero.sharded_stage import ShardedStage
from shardwright.parallel.zero.tied_embedding import TiedEmbedding
from shardwright.parallel.zero.unit_setting import (
    Sharding,
    StageSharding,
    TensorPool,
    UnitSetting,
    dtype_of,
    tensor_pool,
)
from shardwright.parallel.zero.weight_stash import WeightStash
from shardwright.precision.float8_experts import Float8Experts
from shardwright.precision.float8_linear import CutDim, Float8Linear, ReduceMax, make_float8_state
from shardwright.precision.loss_scale import LossScale
from shardwright.schedule.action import Kind
from shardwright.schedule.job_program import job_program
from shardwright.schedule.program_check import program_faults
from shardwright.schedule.schedule import Program
from shardwright.schedule.shape_program import forward_of
from shardwright.sharding.block_sizes import loss_positions
from shardwright.sharding.factored_sums import FactoredSums
from shardwright.sharding.groups import ends
from shardwright.sharding.matrix_exchange import MatrixExchange
from shardwright.sharding.memory_account import RankMemory
from shardwright.sharding.stage_parameters import last_uses, stage_parameters
from shardwright.sharding.unit_update import UnitUpdate
from shardwright.train.gradient_norm import GradientNorm


@dataclass(frozen=True)
class Float8Layers:
    """The fp8 states of a rank's linear layers. `reduce_max` takes the maximum over all ranks that hold parts or copies
    of the same layers."""

    states: list[Float8Linear]
    reduce_max: ReduceMax


@dataclass(frozen=True)
class Replica:
    """One rank's part of a job, ready to run, on its mesh.

    `weight_stashes` is empty unless the program needs several versions of the weights. `float8` has the dense layers
    and the experts, which are sharded over different ranks.
    """

    job: JobSpec
    mesh: Mesh
    stages: dict[int, DecoderStage]
    shards: dict[int, ShardedStage]
    executor: PipelineExecutor
    program: Program
    evaluation: Program
    weight_stashes: dict[int, WeightStash]
    gradient_norm: GradientNorm
    tied: TiedEmbedding
    loss_scale: LossScale | None
    float8: tuple[Float8Layers, Float8Layers]
    pool: TensorPool
    _smaller_programs: dict[int, Program] = field(default_factory=dict)

    def program_of(self, job: JobSpec) -> Program:
        """The program of a step with the job's number of microbatches, which may be smaller while the batch grows."""
        number = job.num_microbatches
        if number == self.program.num_microbatches:
            return self.program
        if number not in self._smaller_programs:
            self._smaller_programs[number] = job_program(job, beside=self.program)
        return self._smaller_programs[number]

    @property
    def float8_states(self) -> list[Float8Linear]:
        """The states of all linear layers with fp8 products."""
        return [state for layers in self.float8 for state in layers.states]

    def routers(self, stage: int) -> Mapping[int, RouterState]:
        """The state of a stage's routers, by layer."""
        return self.stages[stage].routers()

    def memory(self) -> RankMemory:
        """The allocated bytes of this rank, by kind, without activations. Call it after the first update."""
        return measured_memory(self.shards, self.weight_stashes, self.tied, self.pool)

    def compression_bytes_saved(self) -> float:
        """This rank's part of the bytes that compression of gradients saved in communication so far; the job's savings
        are the sum over all ranks. Negative if a method sends more than an uncompressed reduction."""
        return sum(unit.compression_bytes_saved for shards in self.shards.values() for unit in shards.units)

    def rescale_errors(self, factor: float) -> None:
        """Multiply the errors of compression by what the scale of the loss was multiplied by."""
        for shards in self.shards.values():
            for unit in shards.units:
                unit.rescale_errors(factor)

    def finish_gradients(self) -> None:
        """Block until every gradient is summed over all replicas and all uses of its parameter."""
        for shards in self.shards.values():
            shards.wait()
        self.tied.sum_gradients()
        for shards in self.shards.values():
            shards.reduce_late()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """A context in which every parameter has its full values, even if ZeRO shards it."""
        for shards in self.shards.values():
            shards.gather()
            shards.finish_gather()
        try:
            yield
        finally:
            for shards in self.shards.values():
                shards.release()


def job_mesh(
    job: JobSpec, rank: int, device: torch.device, watch: Watch | None = None, stand_ins: StandIns | None = None
) -> Mesh:
    """The process groups that the job's plan needs. Every rank of the job calls this."""
    program = job_program(job)
    needs = MeshNeeds(
        job.plan,
        ends=ends(job.plan, program.placement) if job.model.shares_table else None,
        side_by_side=any(action.kind is Kind.OVERLAP for row in program.ranks for action in row),
        ranks_per_node=job.cluster.devices_per_node,
    )
    return make_mesh(needs, rank, device, job.run.timeout_s, watch, stand_ins)


def build(job: JobSpec, mesh: Mesh, initial: Initial | None = None) -> Replica:
    """Make this rank's part of the job, with `initial` weights, by default random values from the run's seed."""
    program = job_program(job)
    assert not (faults := program_faults(program)), "\n".join(faults)  # ranks would deadlock
    stages = _stages(job, mesh, program)
    tied = _tied(job, stages, mesh)
    setting = UnitSetting(job, tensor_pool(mesh.device, mesh.streams), initial or seeded(job.run.seed))
    shards = _shard_stages(mesh, stages, tied, setting)
    _share_table(job, tied, shards, program.num_stages - 1)
    is_stashed = program.weights != "current"
    weight_stashes = {stage: WeightStash(sharded) for stage, sharded in shards.items()} if is_stashed else {}
    return Replica(
        job=job,
        mesh=mesh,
        stages=stages,
        shards=shards,
        executor=PipelineExecutor(
            dict(stages), shards, mesh, weight_stashes, separates_documents=job.data.separate_documents
        ),
        program=program,
        evaluation=forward_of(program),
        weight_stashes=weight_stashes,
        gradient_norm=_gradient_norm(job, mesh, stages, shards, tied=tied),
        tied=tied,
        loss_scale=LossScale(job.precision.loss_scale, job.precision.loss_scale_growth_steps)
        if job.precision.scales_loss
        else None,
        float8=_use_float8(job, stages, mesh),
        pool=setting.pool,
    )


def _shard_stages(
    mesh: Mesh, stages: dict[int, DecoderStage], tied: TiedEmbedding, setting: UnitSetting
) -> dict[int, ShardedStage]:
    """The state of each stage, which replicas share."""
    job, shards = setting.job, {}
    link = HostLink(mesh.streams) if mesh.streams else None
    for stage, module in stages.items():
        regions = {
            name: [p for p in parameters if p is not tied.last or not tied.are_both_here]
            for name, parameters in module.regions().items()
        }
        late = [p for parameters in regions.values() for p in parameters if p is tied.table or p is tied.last]
        sharding = StageSharding(*(Sharding.of(job, mesh, stage, is_expert, link) for is_expert in (False, True)))
        shards[stage] = ShardedStage(regions, late, sharding, setting)
        shards[stage].make_optimizers(partial(_unit_steps, job, mesh))
        module.through = shards[stage].through
    return shards


def _share_table(job: JobSpec, tied: TiedEmbedding, shards: dict[int, ShardedStage], last_stage: int) -> None:
    """Give the table to the regions of the last stage that use it: the last stage's own copy, or the first stage's
    memory if this rank holds both stages."""
    if tied.last is None:
        return
    last, (first_region, *other_regions) = shards[last_stage], last_uses(job.model)
    if tied.table is None:
        unit = last.unit_of(tied.last)
    else:
        unit = next(sharded.unit_of(tied.table) for sharded in shards.values() if sharded.holds(tied.table))
        tied.share_memory(unit)
        last.also_uses(first_region, unit)
    for region in other_regions:
        last.also_uses(region, unit)


def _gradient_norm(
    job: JobSpec, mesh: Mesh, stages: dict[int, DecoderStage], shards: dict[int, ShardedStage], tied: TiedEmbedding
) -> GradientNorm:
    """The norm of the model's gradient, in which a tied tensor counts once, as the table."""
    counted_parameters = {
        stage: (shards[stage], [p for p in placed_parameters(module).values() if p is not tied.last])
        for stage, module in stages.items()
    }
    regions_of_stages = [stage_parameters(job.model, job.plan, stage) for stage in range(job.plan.num_stages)]
    num_parameters = [sum(map(len, regions.values())) for regions in regions_of_stages]
    num_parameters[-1] -= job.model.shares_table
    return GradientNorm(counted_parameters, num_parameters, mesh)


def _max_over_holders(amaxes: Tensor, axes: Sequence[Axis]) -> Tensor:
    """The maxima over all ranks that hold parts or copies of the same layers."""
    for axis in axes:
        amaxes = all_reduce_max(amaxes, axis)
    return amaxes


def _use_float8(job: JobSpec, stages: dict[int, DecoderStage], mesh: Mesh) -> tuple[Float8Layers, Float8Layers]:
    """Let the linear layers of the blocks compute in fp8, dense layers and experts. Embeddings, head, routers, norms
    and the core of attention keep their dtype."""
    dense: list[Float8Linear] = []
    experts: list[Float8Linear] = []
    blocks = (block for stage in stages.values() for block in stage.blocks().values())
    for module in (module for block in blocks for module in block.modules()):
        if job.precision.float8 == "none":
            break
        if isinstance(module, ColumnLinear | RowLinear):
            state = _float8_state(job, mesh.tp, "outputs" if isinstance(module, ColumnLinear) else "inputs")
            module.weight.float8 = state
            dense.append(state)
        if isinstance(module, Experts):
            matrices: tuple[tuple[PlacedParameter, CutDim], ...] = ((module.up, "outputs"), (module.down, "inputs"))
            for weight, sharded_dim in matrices:
                states = [_float8_state(job, mesh.expert_tp, sharded_dim) for _ in range(weight.shape[0])]
                weight.float8 = Float8Experts(states)
                experts += states
    replicas, expert_replicas = mesh.replicas, mesh.expert_replicas
    dense_axes = (mesh.tp, replicas.shards[0], replicas.copies)
    expert_axes = (mesh.expert_tp, expert_replicas.shards[0], expert_replicas.copies)
    dense_layers, expert_layers = (
        Float8Layers(states, partial(_max_over_holders, axes=axes))
        for states, axes in ((dense, dense_axes), (experts, expert_axes))
    )
    return dense_layers, expert_layers


def _float8_state(job: JobSpec, axis: Axis, sharded_dim: CutDim) -> Float8Linear:
    """The fp8 state of one matrix, whose `sharded_dim` is split over `axis`."""
    precision, reduce_max = job.precision, partial(all_reduce_max, axis=axis)
    assert precision.float8 != "none"
    return make_float8_state(
        precision.float8,
        "none" if axis.size == 1 else sharded_dim,
        reduce_max,
        history=precision.float8_history,
        weight_gradients=precision.float8_weight_gradients,
    )


def _stages(job: JobSpec, mesh: Mesh, program: Program) -> dict[int, DecoderStage]:
    """The stages of this rank. Their parameters have no memory yet."""
    plan = job.plan
    policies = dict(enumerate(layer_policies(plan, job.model.layers, job.model.mtp_layers)))
    host = HostPool(mesh.device, mesh.streams) if plan.offload_activations else None
    stages = {}
    for stage in program.placement.stages_of(mesh.pp.index):
        span = stage_span(plan, job.model.layers, stage)
        # Each stage has its own, since it keeps the deferred weight gradients.
        sharding = LayerSharding(
            mesh.tp,
            mesh.cp,
            mesh.ep,
            mesh.expert_tp,
            sequence_parallel=plan.sequence_parallel,
            cp_method=plan.cp_method,
            float8_dispatch=job.precision.float8_dispatch,
        )
        module = DecoderStage(job.model, span, sharding, policies, host=host, loss_positions=loss_positions(job))
        stages[stage] = module.prepare(mesh.device, dtype_of(job.precision.compute))
    return stages


def _tied(job: JobSpec, stages: dict[int, DecoderStage], mesh: Mesh) -> TiedEmbedding:
    """The tied embedding, with the copies of the table that this rank holds."""
    table: PlacedParameter | None = None
    last: PlacedParameter | None = None
    for module in stages.values() if job.model.shares_table else ():
        table = module.embedding.weight if module.embedding is not None else table
        last = module.shared_table if module.head is not None else last
    return TiedEmbedding(table, last, mesh.ends)


def _unit_steps(job: JobSpec, mesh: Mesh, update: UnitUpdate | None, unit: FlatUnit) -> MatrixSteps | None:
    """The steps of an update on this rank, with `unit` one of its units; None if each element is updated by itself."""
    shards = unit.sharding.shards
    tp = mesh.expert_tp if unit.parameters[0].place.is_expert else mesh.tp
    if isinstance(update, MatrixExchange):
        dtype = torch.float32 if update.itemsize == torch.float32.itemsize else torch.bfloat16
        return Muon(update, shards, tp, dtype, job.optimizer.newton_schulz_steps)
    return Adafactor(update, shards, tp) if isinstance(update, FactoredSums) else None
