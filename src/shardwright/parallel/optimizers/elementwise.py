"""Optimizers that do with each element what its own past says: AdamW, Adam, SGD, Lion; and what goes before the update
of whole matrices.

They have torch's arithmetic and states of torch's names. A moment may be kept in bf16 and computed with in float32
(DeepSeek-AI 2024, DeepSeek-V3, arXiv 2412.19437, section 3.3.3): it is widened, moves as in float32, and updates its
weight; only then it is rounded to the nearest bf16 number. bf16 has 8 bits, so numbers between 2^e and 2^(e+1) are
2^(e-7) apart, and what a step changes by less than half of that, 0.2 to 0.4 % of the moment, is lost. With a decay of
0.95 a step covers 5 % of the way from the moment to the squared gradient: it stands still where that is within 4 to 8 %
of it, which is 2 to 4 % of its root. With a decay of 0.999 it covers 0.1 %, and a moment that should fall stands still
for ever: decays like this are refused (config/checks/check_moments.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import unwrap
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from shardwright.config.optimizer import OptimizerSpec
from shardwright.sharding.optimizer_state import moments_of

# Elements that are computed with at a time where that takes memory. In float32 two tensors of a block are 4 MiB, which
# stay in a cache, or on a GPU 64 MiB, which make kernels that take far longer than their launch.
BLOCKS = {"cpu": 1 << 19, "cuda": 1 << 23}

# Added to squares of gradients, and what a second moment decays by in step t (Shazeer and Stern 2018, arXiv 1804.04235,
# sections 4 and 7.2): 1 - t^-0.8.
LEAST_SQUARE, _DECAY_POWER = 1e-30, 0.8


@dataclass(frozen=True)
class Elements:
    """Elements of a weight, their gradient, and what is remembered of them, in float32; `steps` tensor and `number`
    count the updates, this one included."""

    weight: Tensor
    gradient: Tensor
    moments: list[Tensor]
    steps: Tensor
    number: int
    rate: float
    weight_decay: float


# Updates weights; or turns gradients, in place, into what an update of whole matrices goes on with.
Rule = Callable[[OptimizerSpec, Elements], None]


def adamw(spec: OptimizerSpec, of: Elements) -> None:
    """Loshchilov and Hutter 2019 (arXiv 1711.05101, algorithm 2)."""
    _fused_adam(torch._fused_adamw_, spec, of)


def adam(spec: OptimizerSpec, of: Elements) -> None:
    """Kingma and Ba 2015 (arXiv 1412.6980, algorithm 1); weight decay is added to the gradient."""
    _fused_adam(torch._fused_adam_, spec, of)


def _fused_adam(kernel: Callable[..., None], spec: OptimizerSpec, of: Elements) -> None:
    kernel(
        [of.weight], [of.gradient], of.moments[:1], of.moments[1:], [], [of.steps], lr=of.rate, beta1=spec.beta1,
        beta2=spec.beta2, weight_decay=of.weight_decay, eps=spec.epsilon, amsgrad=False, maximize=False,
    )  # fmt: skip


def sgd(spec: OptimizerSpec, of: Elements) -> None:
    """Sutskever et al. 2013 (PMLR 28(3), section 2), as torch has it; weight decay is added to the gradient."""
    torch._fused_sgd_(
        [of.weight], [of.gradient], of.moments, weight_decay=of.weight_decay, momentum=spec.momentum, lr=of.rate,
        dampening=0.0, nesterov=False, maximize=False, is_first_step=False,
    )  # fmt: skip


def lion(spec: OptimizerSpec, of: Elements) -> None:
    """Chen et al. 2023 (arXiv 2302.06675, algorithm 2)."""
    (moment,) = of.moments
    step = torch.mul(moment, spec.beta1).add_(of.gradient, alpha=1 - spec.beta1).sign_()
    of.weight.mul_(1 - of.rate * of.weight_decay).add_(step, alpha=-of.rate)
    moment.mul_(spec.beta2).add_(of.gradient, alpha=1 - spec.beta2)


def nesterov(spec: OptimizerSpec, of: Elements) -> None:
    """The matrix that Muon makes orthogonal: the gradient, one step further along its mean."""
    (moment,) = of.moments
    moment.lerp_(of.gradient, 1 - spec.momentum)
    of.gradient.lerp_(moment, spec.momentum)


def over_its_root(spec: OptimizerSpec, of: Elements) -> None:
    """Adafactor without factors: the gradient over the root of the mean of its squares."""
    (moment,) = of.moments
    newest = share_of_newest(of.number)
    moment.mul_(1 - newest).addcmul_(of.gradient, of.gradient, value=newest).add_(LEAST_SQUARE * newest)
    of.gradient.mul_(moment.rsqrt())


def nothing(spec: OptimizerSpec, of: Elements) -> None:
    """Adafactor's factors are of whole matrices: before them there is nothing to do."""


def share_of_newest(number: int) -> float:
    """How much of Adafactor's second moment step `number`, from 1, is."""
    return float(number**-_DECAY_POWER)


# Elements [start, stop) of a weight, and the steps that were done before they were trained.
_Span = tuple[int, int, int]


class ElementwiseOptimizer(torch.optim.Optimizer):
    """Updates flat tensors of float32 weights, or turns their gradients, by a rule for each element."""

    # Without the guard of torch's, which imports the compiler: a second for every process, and nothing is compiled.
    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)

    def __init__(
        self, spec: OptimizerSpec, groups: Sequence[dict[str, Any]], moments: torch.dtype, by_matrix: bool = False
    ) -> None:
        """`groups` of weights, each with its `weight_decay`; `moments` are kept in those numbers."""
        super().__init__(groups, {"lr": spec.learning_rate})
        self.names = moments_of(spec, by_matrix)
        self.moments = moments
        self.num_steps = 0
        self._spans: dict[Tensor, list[_Span]] = {}  # of elements that were not trained from the first step on
        facts = spec.facts
        self._spec, self._in_blocks = spec, facts.in_blocks and not by_matrix
        self._rule: Rule = resolve_name(facts.matrix_rule if by_matrix else facts.rule)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient."""
        self.num_steps += 1
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)

    def moment(self, weight: Tensor, name: str) -> Tensor:
        """The moment of a weight under a name; zeros if there is none yet."""
        state = self.state[weight]
        if name not in state:
            state[name] = torch.zeros_like(weight, dtype=self.moments, memory_format=torch.preserve_format)
        found: Tensor = state[name]
        return found

    def go_on_after(self, number: int) -> None:
        """Continue as after so many steps: after none with nothing remembered."""
        self.num_steps = number
        self._spans.clear()
        if number == 0:
            self.state.clear()
        for weight in (weight for group in self.param_groups for weight in group["params"]) if number else ():
            for name in self.names:
                self.moment(weight, name)
            self.state[weight]["step"] = torch.tensor(float(number), device=weight.device)

    def count_after(self, weight: Tensor, start: int, stop: int, number: int) -> None:
        """Count the steps of elements [start, stop) of a weight from behind step `number` on: they were not trained
        before."""
        others = [
            (max(first, low), min(end, high), before)
            for first, end, before in self._spans.get(weight, ())
            for low, high in ((0, start), (stop, weight.numel()))
        ]
        self._spans[weight] = [span for span in (*others, (start, stop, number)) if span[0] < span[1]]

    def _spans_of(self, weight: Tensor) -> list[_Span]:
        """All elements, those with as many steps side by side together."""
        spans, filled = list[_Span](), 0
        for start, stop, before in [*sorted(self._spans.get(weight, ())), (weight.numel(), weight.numel(), 0)]:
            for span in ((filled, start, 0), (start, stop, before)):
                if span[0] < span[1] and spans and spans[-1][2] == span[2]:
                    spans[-1] = (spans[-1][0], span[1], span[2])
                elif span[0] < span[1]:
                    spans.append(span)
            filled = stop
        return spans

    def _update(self, weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        for name in self.names:
            self.moment(weight, name)
        if "step" not in state:
            state["step"] = torch.zeros((), device=weight.device)
        state["step"] += 1
        if (
            weight.is_meta
        ):  # a dry run: kernels for several tensors refuse those without memory, so others read and write
            for x in (weight, *(self.moment(weight, name) for name in self.names)):
                x.add_(gradient)
            return
        for start, stop, before in self._spans_of(weight):
            self._update_span(weight, gradient, slice(start, stop), before, group=group)

    def _update_span(
        self, weight: Tensor, gradient: Tensor, span: slice, before: int, group: dict[str, Any]
    ) -> None:  # fmt: skip
        """Update elements of a weight, which were not trained in the first `before` steps."""
        steps, number = self.state[weight]["step"], self.num_steps - before
        steps = steps - before if before else steps
        weight, gradient, moments = weight[span], gradient[span], [self.moment(weight, n)[span] for n in self.names]

        def apply(here: slice, moments: list[Tensor]) -> None:
            of = Elements(weight[here], gradient[here], moments, steps, number, group["lr"], group["weight_decay"])
            self._rule(self._spec, of)

        is_narrow = bool(moments) and self.moments != torch.float32
        if not (is_narrow or self._in_blocks):
            apply(slice(None), moments)
            return
        size = min(BLOCKS[weight.device.type], max(1, weight.numel()))
        wide = torch.empty(len(moments) if is_narrow else 0, size, device=weight.device)
        for start in range(0, weight.numel(), size):
            here = slice(start, min(start + size, weight.numel()))
            kept = [moment[here] for moment in moments]
            if not is_narrow:
                apply(here, kept)
                continue
            widened = [of[: len(moment)].copy_(moment) for of, moment in zip(wide, kept, strict=True)]
            apply(here, widened)
            for moment, values in zip(kept, widened, strict=True):
                moment.copy_(values)


def make_optimizer(
    spec: OptimizerSpec, decayed: list[Tensor], plain: list[Tensor], moments: torch.dtype = torch.float32,
    by_matrix: bool = False,
) -> ElementwiseOptimizer:  # fmt: skip
    """For weights that decay (what is drawn at random: matrices and embeddings) and that don't (norms and biases), with
    moments in float32 or bf16."""
    groups = [{"params": decayed, "weight_decay": spec.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return ElementwiseOptimizer(spec, [group for group in groups if group["params"]], moments, by_matrix)
