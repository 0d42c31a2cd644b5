"""AdamW, its learning rate, and the global gradient norm that clips it."""

import math

import torch
from torch import Tensor, nn

from shardwright.parallel.collectives import all_reduce
from shardwright.parallel.mesh import Mesh
from shardwright.parallel.parameter import PlacedParameter
from shardwright.spec.job import OptimizerSpec


def make_adamw(
    spec: OptimizerSpec, parameters: list[PlacedParameter], masters: list[nn.Parameter] | None = None
) -> torch.optim.AdamW:
    """Decay for what is drawn at random (matrices and embeddings), none for norms and biases.

    `masters` are updated in place of the parameters, where these change under the optimizer's hands.
    """
    updated: list[nn.Parameter] = list(parameters) if masters is None else masters
    decayed = [m for p, m in zip(parameters, updated, strict=True) if p.place.init == "normal"]
    plain = [m for p, m in zip(parameters, updated, strict=True) if p.place.init != "normal"]
    groups = [{"params": decayed, "weight_decay": spec.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=spec.learning_rate,
        betas=(spec.beta1, spec.beta2),
        eps=spec.epsilon,
        fused=True,
    )


def learning_rate(spec: OptimizerSpec, step: int) -> float:
    """Of step 0, 1, ...: linear to the peak over the warm-up, then a cosine to its floor (arXiv 1608.03983)."""
    if step < spec.warmup_steps:
        return spec.learning_rate * (step + 1) / spec.warmup_steps
    progress = (step - spec.warmup_steps) / max(1, spec.steps - spec.warmup_steps)
    floor = spec.min_learning_rate_ratio
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))
    return spec.learning_rate * (floor + (1.0 - floor) * cosine)


class GradientNorm:
    """The norm of the whole model's gradient, right across all axes.

    Each parameter of the model has a slot, and each tensor is counted where it is held: shards by every tp rank,
    replicas by the first alone, a tied embedding by the first stage. The slots are summed in the order of the model,
    so the norm does not depend on how the pipeline is cut, to the last bit.
    """

    def __init__(self, counted: dict[int, list[PlacedParameter]], num_stages: int, mesh: Mesh) -> None:
        """`counted`: by stage, the parameters that this rank counts, in order of the model."""
        self._mesh = mesh
        sizes = torch.zeros(num_stages, dtype=torch.int64, device=mesh.device)
        for stage, parameters in counted.items():
            sizes[stage] = len(parameters)
        all_reduce(sizes, mesh.pp)
        starts = [0, *torch.cumsum(sizes, 0).tolist()]
        self._num_slots = starts[-1]
        self._slots: list[tuple[int, PlacedParameter]] = [
            (starts[stage] + i, parameter)
            for stage, parameters in counted.items()
            for i, parameter in enumerate(parameters)
            if mesh.tp.index == 0 or "tp" in parameter.place.sharded_over
        ]

    def __call__(self) -> Tensor:
        """The norm of the gradients as they are, float64, on every rank. Moves one small all-reduce over tp and pp."""
        squares = torch.zeros(self._num_slots, dtype=torch.float64, device=self._mesh.device)
        for slot, parameter in self._slots:
            assert parameter.grad is not None
            # Rows in float32, then their norms in float64: exact enough, and no float64 copy of the gradient is made.
            rows = torch.linalg.vector_norm(parameter.grad, dim=-1)
            squares[slot] = torch.linalg.vector_norm(rows, dtype=torch.float64).square()
        all_reduce(squares, self._mesh.tp)
        all_reduce(squares, self._mesh.pp)
        return squares.sum().sqrt()
