"""One rank of a job without its cluster: the real build, steps and optimizer, on tensors that have no memory.

Tensors are on torch's device meta: operators give the shapes of their results and compute nothing. Collectives return
at once (parallel/comm/transport.py). So a rank of a model of any size runs in seconds on one CPU, and shows its peak
memory, the operator at the peak, and the bytes that it would send.

Routing, which depends on values, is assumed even: every expert receives equally many rows, and no choice finds its
expert full.
"""

import resource
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from shardwright.config.base import PlanError
from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.progress_records import tell_share
from shardwright.measure.memory_trace import MemoryTrace, Origin
from shardwright.measure.saved_tensors import LiveBytes
from shardwright.memory.job_memory import rank_memory
from shardwright.memory.step_collectives import ledger_table, step_ledger
from shardwright.parallel.recompute.offload import HostPool
from shardwright.parallel.zero.held_memory import held_storages
from shardwright.sharding.memory_account import RankMemory
from shardwright.train.build import Replica
from shardwright.train.dry_steps import DrySteps

_BUILT = 0.2  # of the work, usually, until a rank is built
_MOST_NAMED = 10  # operators, those whose results are the largest part of the peak


@dataclass(frozen=True, kw_only=True)
class PeakMemory(RankMemory):
    """Bytes at the peak, by kind, on the device and on the host; and the operator and action at that moment.

    `activations` are what autograd keeps for backwards, `buffers` those of the pool and the permanent ones outside the
    state, and `working` all else: temporary memory of operators, messages, gradients within a layer. `largest` has the
    bytes of the tensors made in this step and still alive, by operator and line of the source.
    """

    operator: str
    action: str
    largest: tuple[tuple[Origin, int], ...]


@dataclass(frozen=True)
class DryRun:
    """The dry run of one rank: a step, or `num_steps` steps, enough to fill a pipeline that never drains.

    `place` is the rank with its coordinates, `collectives` calls and bytes by "collective axis", as in the ledger of a
    run, `curve` the peak memory of each action, in their order. `account` and `account_collectives` are the predictions
    without a run. `host_peak_bytes` is the memory of this process, not of the rank.
    """

    rank: int
    place: str
    device: str
    num_steps: int
    peak: PeakMemory
    curve: tuple[tuple[str, int], ...]
    collectives: dict[str, dict[str, int]]
    account_collectives: dict[str, dict[str, int]]
    account: RankMemory
    num_operators: int
    took_s: float
    host_peak_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self) | {"peak": self.peak.as_dict(), "account": self.account.as_dict()}


def dry_run(job: JobSpec, rank: int, device: str) -> DryRun:
    """Run a rank of a job as on a `device`, cpu or cuda. PlanError for a rank that does not exist."""
    if not 0 <= rank < job.plan.world:
        plan = job.plan
        ranks = say("{degrees} = {world}, 0 to {last}", degrees=plan.degrees, world=plan.world, last=plan.world - 1)
        raise PlanError(
            say("dry run of {name}", name=job.name),
            [say("rank {rank} is asked for, and the plan has {ranks}", rank=rank, ranks=ranks)],
        )
    began_s = time.perf_counter()
    host = _HostMemory()
    trace, saved = MemoryTrace(host), LiveBytes()
    with trace:
        tell_share(say("building the rank"), 0.0)
        steps = DrySteps(job, rank, device)
        replica, mesh = steps.replica, steps.mesh
        host.look_at(replica)
        with saved:  # in both runs, because it adds operators
            trace.begin()
            tell_share(say("a step to know its peak"), _BUILT)
            steps.run()
            least_bytes, previous_bytes = trace.peak_bytes, -1
            observer = _Observer(replica, trace, saved, host, least_bytes=least_bytes)
            while previous_bytes < replica.pool.peak_bytes + host() or observer.peak is None:
                previous_bytes = replica.pool.peak_bytes + host()  # a step begins with the previous step's buffers
                observer = _Observer(replica, trace, saved, host, least_bytes=least_bytes)
                trace.begin(observer)
                tell_share(say("a step, looked at after each operator"), (1 + _BUILT) / 2)
                steps.run()
                least_bytes = observer.most_bytes
    place = mesh.shape.coordinates(rank)
    return DryRun(
        rank,
        mesh.shape.describe(rank),
        device,
        steps.num_steps,
        observer.peak,
        curve=tuple(observer.curve()),
        collectives=mesh.ledger.table(),
        account_collectives=ledger_table(step_ledger(job, steps.program, rank)),
        account=rank_memory(_on(job, device), steps.program, place["pp"], place["tp"]),
        num_operators=trace.num_operators,
        took_s=time.perf_counter() - began_s,
        host_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _on(job: JobSpec, device: str) -> JobSpec:
    return job.model_copy(update={"run": job.run.model_copy(update={"device": device})})


class _HostMemory:
    """The contents of host memory: offloaded optimizer state and values, and offloaded inputs."""

    def __init__(self) -> None:
        self._state_bytes = 0
        self._pools: list[HostPool] = []

    def __call__(self) -> int:
        """Bytes at this moment."""
        return self._state_bytes + sum(pool.allocated_bytes for pool in self._pools)

    def look_at(self, replica: Replica) -> None:
        """Find the memory on the host, once a replica is built."""
        self._state_bytes = sum(held_storages(replica.shards, replica.tied)["host"].values())
        pools = {id(stage.host): stage.host for stage in replica.stages.values() if stage.host is not None}
        self._pools = list(pools.values())


class _Observer:
    """Looks at memory after each operator of a step: by kind at the peak, and at the peak of each action. It looks by
    kind only at `least_bytes` or more, the peak of the previous step, and only if that is more than so far; `peak` is
    None if no operator reaches it."""

    def __init__(
        self, replica: Replica, trace: MemoryTrace, saved: LiveBytes, host: _HostMemory, *, least_bytes: int
    ) -> None:
        self._replica, self._trace, self._saved, self._host = replica, trace, saved, host
        self._least_bytes = least_bytes
        self._row = replica.executor.row
        self._most: dict[int, int] = {}  # by action
        self.peak: PeakMemory | None = None

    def __call__(self) -> None:
        """An operator ran."""
        index = min(len(self._replica.executor.performed), len(self._row) - 1)
        now_bytes = self._trace.now_bytes
        if now_bytes > self._most.get(index, -1):
            self._most[index] = now_bytes
        if now_bytes >= self._least_bytes:
            self._least_bytes = now_bytes + 1
            self.peak = self._look(self._trace.origin().operator, str(self._row[index]))

    @property
    def most_bytes(self) -> int:
        """The largest number of bytes after any operator."""
        return max(self._most.values())

    def curve(self) -> list[tuple[str, int]]:
        """The peak of each action, in their order."""
        return [(str(self._row[index]), self._most[index]) for index in sorted(self._most)]

    def _look(self, operator: str, action: str) -> PeakMemory:
        replica = self._replica
        versions = [t for weight_stash in replica.weight_stashes.values() for t in weight_stash.memory()]
        storages = held_storages(replica.shards, replica.tied, versions)
        kind_bytes = {kind: sum(sizes.values()) for kind, sizes in storages.items()}
        activations = self._saved.current_bytes_except(
            {storage_id for sizes in storages.values() for storage_id in sizes}
        )
        buffers = replica.pool.held_bytes + kind_bytes["kept"]
        state = kind_bytes["parameters"] + kind_bytes["gradients"] + kind_bytes["optimizer"]
        return PeakMemory(
            parameters_bytes=kind_bytes["parameters"],
            gradients_bytes=kind_bytes["gradients"],
            optimizer_bytes=kind_bytes["optimizer"],
            activations_bytes=activations,
            buffers_bytes=buffers,
            host_bytes=self._host(),
            working_bytes=self._trace.now_bytes - state - activations - buffers,
            operator=operator,
            action=action,
            largest=self._largest(),
        )

    def _largest(self) -> tuple[tuple[Origin, int], ...]:
        origin_bytes: Counter[Origin] = Counter()
        for number, num_bytes in self._trace.live.items():
            if number in self._trace.origins:
                origin_bytes[self._trace.origins[number]] += num_bytes
        return tuple(origin_bytes.most_common(_MOST_NAMED))
