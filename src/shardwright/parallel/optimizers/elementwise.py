"""Optimizers that update each element by itself: AdamW, Adam, SGD, Lion; and rules that precede the update of whole
matrices.

They have torch's arithmetic, and states with torch's names. A moment may be kept in bf16 and computed in float32
(DeepSeek-AI 2024, DeepSeek-V3, arXiv 2412.19437, section 3.3.3): it is widened, changes as in float32, and updates its
weight; only then it is rounded to the nearest bf16 number. bf16 has 8 bits, so numbers between 2^e and 2^(e+1) are
2^(e-7) apart. A step that changes a moment by less than half of that, 0.2 to 0.4 % of the moment, is lost. With a decay
of 0.95 a step covers 5 % of the way from the moment to the squared gradient: the moment does not change if the squared
gradient is within 4 to 8 % of it, which is 2 to 4 % of its root. With a decay of 0.999 a step covers 0.1 %, and a
moment that should fall never does: such decays are refused (config/checks/check_precision.py).

Weights may be in bf16 too, without float32 master weights: then they, and gradients in bf16, are widened for the step
as moments are, and weights are rounded after it. If all are in bf16 one fused kernel of torch's does that inside.
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

# Elements of a block, for rules that need working memory. In float32 two tensors of a block are 4 MiB, which stay in a
# CPU's cache; on a GPU they are 64 MiB, so that a kernel takes far longer than its launch.
BLOCKS = {"cpu": 1 << 19, "cuda": 1 << 23}

# Added to squares of gradients; and the power in the decay of a second moment in step t, 1 - t^-0.8 (Shazeer and Stern
# 2018, arXiv 1804.04235, sections 4 and 7.2).
LEAST_SQUARE, _DECAY_POWER = 1e-30, 0.8


@dataclass(frozen=True)
class Elements:
    """Elements of a weight, their gradient and their moments: in float32, or all in bf16 for a fused kernel, which
    computes in float32 and rounds what it writes. The tensor `steps` and the number `number`
    count the updates, including this one."""

    weight: Tensor
    gradient: Tensor
    moments: list[Tensor]
    steps: Tensor
    number: int
    rate: float
    weight_decay: float


# Updates weights; or transforms gradients in place, for an update of whole matrices.
Rule = Callable[[OptimizerSpec, Elements], None]


def adamw(spec: OptimizerSpec, elements: Elements) -> None:
    """Loshchilov and Hutter 2019 (arXiv 1711.05101, algorithm 2)."""
    _fused_adam(torch._fused_adamw_, spec, elements)


def adam(spec: OptimizerSpec, elements: Elements) -> None:
    """Kingma and Ba 2015 (arXiv 1412.6980, algorithm 1); weight decay is added to the gradient."""
    _fused_adam(torch._fused_adam_, spec, elements)


def _fused_adam(kernel: Callable[..., None], spec: OptimizerSpec, elements: Elements) -> None:
    kernel(
        [elements.weight],
        [elements.gradient],
        elements.moments[:1],
        elements.moments[1:],
        [],
        [elements.steps],
        lr=elements.rate,
        beta1=spec.beta1,
        beta2=spec.beta2,
        weight_decay=elements.weight_decay,
        eps=spec.epsilon,
        amsgrad=False,
        maximize=False,
    )


def sgd(spec: OptimizerSpec, elements: Elements) -> None:
    """Sutskever et al. 2013 (PMLR 28(3), section 2), as torch has it; weight decay is added to the gradient."""
    torch._fused_sgd_(
        [elements.weight],
        [elements.gradient],
        elements.moments,
        weight_decay=elements.weight_decay,
        momentum=spec.momentum,
        lr=elements.rate,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    )


def lion(spec: OptimizerSpec, elements: Elements) -> None:
    """Chen et al. 2023 (arXiv 2302.06675, algorithm 2)."""
    (moment,) = elements.moments
    step = torch.mul(moment, spec.beta1).add_(elements.gradient, alpha=1 - spec.beta1).sign_()
    elements.weight.mul_(1 - elements.rate * elements.weight_decay).add_(step, alpha=-elements.rate)
    moment.mul_(spec.beta2).add_(elements.gradient, alpha=1 - spec.beta2)


def nesterov(spec: OptimizerSpec, elements: Elements) -> None:
    """Nesterov momentum, which gives the matrix that Muon makes orthogonal: the gradient is moved towards its mean."""
    (moment,) = elements.moments
    moment.lerp_(elements.gradient, 1 - spec.momentum)
    elements.gradient.lerp_(moment, spec.momentum)


def over_its_root(spec: OptimizerSpec, elements: Elements) -> None:
    """Adafactor without factors: the gradient divided by the root of the mean of its squares."""
    (moment,) = elements.moments
    newest = share_of_newest(elements.number)
    moment.mul_(1 - newest).addcmul_(elements.gradient, elements.gradient, value=newest).add_(LEAST_SQUARE * newest)
    elements.gradient.mul_(moment.rsqrt())


def nothing(spec: OptimizerSpec, elements: Elements) -> None:
    """No rule, for Adafactor with factors, which are of whole matrices."""


def share_of_newest(number: int) -> float:
    """The share of step `number`, from 1, in Adafactor's second moment."""
    return float(number**-_DECAY_POWER)


# Elements [start, stop) of a weight, and the number of steps that were done before they were trained.
_Span = tuple[int, int, int]


class ElementwiseOptimizer(torch.optim.Optimizer):
    """Updates flat tensors of weights, or transforms their gradients, by a rule for each element."""

    # Without torch's guard, which imports the compiler: that takes each process a second, and nothing is compiled.
    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)

    def __init__(
        self, spec: OptimizerSpec, groups: Sequence[dict[str, Any]], moments: torch.dtype, by_matrix: bool = False
    ) -> None:
        """`groups` of weights, each with its `weight_decay`; `moments` is the number type of the moments."""
        super().__init__(groups, {"lr": spec.learning_rate})
        self.names = moments_of(spec, by_matrix)
        self.moments = moments
        self.num_steps = 0
        self._spans: dict[Tensor, list[_Span]] = {}  # by weight: elements not trained from the first step on
        facts = spec.facts
        self._spec, self._in_blocks = spec, facts.in_blocks and not by_matrix
        self._takes_narrow = facts.takes_narrow and not by_matrix
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
        moment: Tensor = state[name]
        return moment

    def go_on_after(self, number: int) -> None:
        """Continue as after `number` steps: without state after 0 steps."""
        self.num_steps = number
        self._spans.clear()
        if number == 0:
            self.state.clear()
        for weight in (weight for group in self.param_groups for weight in group["params"]) if number else ():
            for name in self.names:
                self.moment(weight, name)
            self.state[weight]["step"] = torch.tensor(float(number), device=weight.device)

    def count_after(self, weight: Tensor, start: int, stop: int, number: int) -> None:
        """Count the steps of elements [start, stop) of a weight from after step `number`: they were not trained
        before."""
        older_spans = [
            (max(first, low), min(end, high), num_missed)
            for first, end, num_missed in self._spans.get(weight, ())
            for low, high in ((0, start), (stop, weight.numel()))
        ]
        self._spans[weight] = [span for span in (*older_spans, (start, stop, number)) if span[0] < span[1]]

    def _spans_of(self, weight: Tensor) -> list[_Span]:
        """The spans of all elements of a weight; neighbours with equal step counts are one span."""
        spans, filled = list[_Span](), 0
        for start, stop, num_missed in [*sorted(self._spans.get(weight, ())), (weight.numel(), weight.numel(), 0)]:
            for span in ((filled, start, 0), (start, stop, num_missed)):
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
        if weight.is_meta:  # a dry run: fused kernels refuse tensors without memory, so other operators read and write
            for x in (weight, *(self.moment(weight, name) for name in self.names)):
                x.add_(gradient)
            return
        for start, stop, num_missed in self._spans_of(weight):
            self._update_span(weight, gradient, slice(start, stop), num_missed, group=group)

    def _update_span(
        self, weight: Tensor, gradient: Tensor, span: slice, num_missed: int, group: dict[str, Any]
    ) -> None:
        """Update elements of a weight, which were not trained in the first `num_missed` steps."""
        steps, number = self.state[weight]["step"], self.num_steps - num_missed
        steps = steps - num_missed if num_missed else steps
        tensors = [weight[span], gradient[span], *(self.moment(weight, name)[span] for name in self.names)]

        def apply(weight: Tensor, gradient: Tensor, *moments: Tensor) -> None:
            rate, decay = group["lr"], group["weight_decay"]
            self._rule(self._spec, Elements(weight, gradient, [*moments], steps, number, rate, decay))

        is_narrow = [tensor.dtype != torch.float32 for tensor in tensors]
        if not (self._in_blocks or any(is_narrow)) or (self._takes_narrow and all(is_narrow)):
            apply(*tensors)
            return
        num_elements = tensors[0].numel()
        size = min(BLOCKS[weight.device.type], max(1, num_elements))
        buffers = torch.empty(sum(is_narrow), size, device=weight.device)
        for start in range(0, num_elements, size):
            parts = [tensor[start : start + size] for tensor in tensors]
            free_buffers = iter(buffers)
            widened = [
                next(free_buffers)[: len(part)].copy_(part) if narrow else part
                for part, narrow in zip(parts, is_narrow, strict=True)
            ]
            apply(*widened)
            for part, values in zip(parts, widened, strict=True):
                if part is not parts[1] and part is not values:  # gradients are not needed any more
                    part.copy_(values)


def make_optimizer(
    spec: OptimizerSpec,
    decayed: list[Tensor],
    plain: list[Tensor],
    moments: torch.dtype = torch.float32,
    by_matrix: bool = False,
) -> ElementwiseOptimizer:
    """An optimizer of weights with decay (those that are initialised at random: matrices and embeddings) and weights
    without (norms and biases), with moments in float32 or bf16."""
    groups = [{"params": decayed, "weight_decay": spec.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return ElementwiseOptimizer(spec, [group for group in groups if group["params"]], moments, by_matrix)
