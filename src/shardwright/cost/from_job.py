"""A job as the cost model sees it: its model and its plan (workload/query.py) on its cluster."""

import math

from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.workload.query import Run, Topology, cut_of


def run_of(job: JobSpec) -> Run:
    """A job on its cluster; a budget for its activations has been met before (account/budget.py)."""
    cluster = job.cluster
    inner, outer, of = cluster.intra_node, cluster.inter_node, cluster.topology
    together = math.prod(of.torus) if of.torus else cluster.devices_per_node or job.plan.world
    ports = of.rails / together if of.rails and not of.torus else 1.0
    return Run(
        shape_of(job.model), cut_of(job), cluster.device, cluster.software, together,
        inner.bandwidth_gb_per_s * 1e9, ports * outer.bandwidth_gb_per_s * 1e9,
        inner.latency_us * 1e-6, outer.latency_us * 1e-6,
        Topology(tuple((level.devices, level.share) for level in of.levels), tuple(of.torus)), job,
    )  # fmt: skip
