"""Bytes of memory on each pipeline rank: state, activations by schedule, what the loss and recomputation need at once.

State is ZeRO's table (Rajbhandari et al. 2020, arXiv 1910.02054, figure 1) with the software's bytes of a gradient.
Activations are what one microbatch keeps (workload/layers.py) times the microbatches in flight. `total` is what the
allocator has given out at the peak; a process needs `overhead` more: the CUDA context, communication buffers, and what
is lost between blocks.
"""

from dataclasses import asdict, dataclass

from shardwright.cost.calibration import Constants, constant, device_of, software_of
from shardwright.spec.software import SoftwareSpec
from shardwright.workload.layers import chains, kept_bytes
from shardwright.workload.operators import FLOAT32, HALF, Context, logits
from shardwright.workload.shape import Run

MOMENTS = 2 * FLOAT32


@dataclass(frozen=True)
class Memory:
    """Bytes on one pipeline rank."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    working: float
    overhead: float

    @property
    def total(self) -> float:
        """What the allocator has given out."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.working

    @property
    def process(self) -> float:
        """What the device must have."""
        return self.total + self.overhead

    def as_dict(self) -> dict[str, float]:
        """By kind, with the total."""
        return asdict(self) | {"total": self.total}


def in_flight(schedule: str, p: int, rank: int, m: int, v: int) -> float:
    """Microbatches whose activations of all its layers a pipeline rank keeps at once."""
    if p == 1:
        return 1.0
    if schedule in ("gpipe", "looped-bfs"):
        return float(m)
    if schedule == "interleaved" or v > 1:
        return min(m * v, 2 * (p - 1 - rank) + (v - 1) * p + 1) / v
    if schedule in ("zb-1p", "zb-h1"):
        return float(min(m, p))
    if schedule in ("zb-2p", "zb-h2", "dualpipe"):
        return float(min(m, 2 * p - 1))
    return float(min(m, p - rank))


def rank_memory(run: Run, constants: Constants) -> list[Memory]:
    """Of each pipeline rank. KeyError says what is not known."""
    software, cut, shape = software_of(run.software), run.cut, run.shape
    pieces = chains(shape, cut, software)
    layers = cut.stage_layers(shape.layers)
    of = _State(run, software)
    generation = device_of(run.device).generation
    found = []
    for rank in range(cut.pp):
        stages = range(rank, len(layers), cut.pp)
        kept = common = routed = largest = 0.0
        num_layers = 0
        for stage in stages:
            first = sum(layers[:stage])
            for layer in range(first, first + layers[stage]):
                kind = "dense" if shape.is_dense(layer) else "experts"
                policy = cut.recompute
                if cut.recompute_layers and layer >= cut.recompute_layers:
                    policy = "none"
                kept += kept_bytes(pieces[kind], policy)
                if policy == "full":
                    largest = max(largest, kept_bytes(pieces[kind], "none") - kept_bytes(pieces[kind], "full"))
                mine, theirs = shape.layer_parameters(layer)
                common, routed = common + mine / cut.tp, routed + theirs / (cut.ep * cut.expert_tp)
                num_layers += 1
        is_first, is_last = rank == 0, rank == cut.pp - 1
        table = shape.vocab * shape.hidden / cut.tp
        common += table * is_first + table * (is_last and not (shape.tied and cut.pp == 1))
        alive = in_flight(cut.schedule, cut.pp, rank, cut.num_microbatches, cut.virtual)
        activations = (kept + software.stage_kept * Context(shape, cut, software).residual) * alive
        working = largest
        if is_last:
            activations += kept_bytes(pieces["head"], "none")
            working = max(working, _loss_bytes(run, software))
        state = of.of_parameters(common, routed)
        working += of.gathered(common, routed, max(1, num_layers))
        lost = constant(constants, generation, "memory_lost") * (activations + working)
        overhead = constant(constants, generation, "context_bytes") + lost
        found.append(Memory(*state, activations, working, overhead))
    return found


def _loss_bytes(run: Run, software: SoftwareSpec) -> float:
    """The most that the logits take at once: in 16 bits and in float32, with their gradient."""
    return logits(Context(run.shape, run.cut, software)) * software.logit_peak


@dataclass(frozen=True)
class _State:
    """Bytes of parameters, gradients and optimizer by element, and who shares them."""

    run: Run
    software: SoftwareSpec

    def of_parameters(self, common: float, routed: float) -> tuple[float, float, float]:
        """(parameters, gradients, optimizer) of elements that all tokens use and of routed experts."""
        cut = self.run.cut
        shared = cut.zero_ranks if 0 < cut.zero_ranks < cut.replicas else cut.replicas
        found = [0.0, 0.0, 0.0]
        gradient = self.software.gradient_bytes
        for elements, ranks in ((common, shared), (routed, cut.expert_replicas)):
            if cut.zero == 3:  # masters are the parameters
                of_kind = (FLOAT32 / ranks, FLOAT32 / ranks, MOMENTS / ranks)
            else:
                optimizer = (FLOAT32 + MOMENTS + self.software.step_bytes) / (ranks if cut.zero else 1)
                of_kind = (HALF, gradient / (ranks if cut.zero == 2 else 1), optimizer)
            for index, size in enumerate(of_kind):
                found[index] += elements * size
        return found[0], found[1], found[2]

    def gathered(self, common: float, routed: float, num_layers: int) -> float:
        """ZeRO-3: parameters and gradients of the layers that are there in full at once: two, and the tables."""
        if self.run.cut.zero != 3 or self.run.cut.replicas == 1:
            return 0.0
        shape, cut = self.run.shape, self.run.cut
        tables = (1 if shape.tied else 2) * shape.vocab * shape.hidden / cut.tp
        layer = max(0.0, common + routed - tables) / num_layers
        return (2 * layer + tables) * HALF + layer * self.software.reduce_bytes
