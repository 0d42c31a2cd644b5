"""What each axis of a plan moves in a step, and over which links: the part of the story that a reason needs."""

from dataclasses import dataclass

from shardwright.config.job import JobSpec
from shardwright.cost.calibration import device_of, software_under
from shardwright.cost.from_job import run_of
from shardwright.cost.group_links import Groups
from shardwright.explain.operator_passes import piece_passes, rank_pieces
from shardwright.explain.rank_collectives import layer_crossings
from shardwright.sharding.mesh import MeshShape


@dataclass(frozen=True)
class AxisTraffic:
    """An axis of `num_ranks` ranks over `num_domains` domains of fast links, and the bandwidth that is stated of the
    slowest link in between, in bytes/s. `layers_bytes` is what a device sends there for its layers in a step, in both
    passes; replicas exchange at the ends of a step, and send nothing for layers."""

    num_ranks: int
    num_domains: int
    bytes_per_s: float
    layers_bytes: float


def traffic(job: JobSpec, axis: str) -> AxisTraffic:
    """What travels over "tp", "cp", "ep" or "dp" in a step, on a rank in the middle of the pipeline."""
    run = run_of(job)
    pieces = rank_pieces(run)[job.plan.pp // 2]
    sizes = MeshShape.of(job.plan).sizes | {"ep": job.plan.ep}
    passes = piece_passes(job, run, software_under(run), None, kinds=pieces)
    sent = sum(of.sent.total for of in layer_crossings(job, pieces, passes, sizes) if of.axis == axis)
    groups = Groups(run)
    group = groups.shard if axis == "dp" else getattr(groups, axis)
    num_domains = int(group.domains)
    fast = run.node_bytes_per_s or device_of(run.device).link_gb_per_s * 1e9
    return AxisTraffic(int(group.size), num_domains, run.network_bytes_per_s if num_domains > 1 else fast, sent)
