"""A second opinion on training: transformers' own model in float64, and losses, clipping, rates and optimizers in plain
loops. Nothing of what is tested is used here.

A sample is a list of documents, which never meet: each is computed alone, from position 0, so there is no mask to get
wrong. Tokens that fill a sample up are not even made.

Shape suffixes: T tokens of a document, H hidden, E experts, V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

UNIT = 2.0**-24  # half of the distance from 1 to the next float32
QUINTIC = (3.4445, -4.7750, 2.0315)  # Muon's polynomial (Jordan et al. 2024)


@dataclass(frozen=True)
class Document:
    """Token ids in a sample, and which of them are learned."""

    ids: tuple[int, ...]
    learned: tuple[bool, ...]


Sample = Sequence[Document]


@dataclass(frozen=True)
class Training:
    """The settings of an optimizer, its rate and its clipping, by the names of a job's fields; and of routers."""

    optimizer: dict[str, Any]
    microbatch_size: int
    sequence: int
    balance: float = 0.0
    balance_scope: str = "microbatch"
    z: float = 0.0


@dataclass
class Moments:
    """The moments of a parameter, and how often it was updated."""

    number: int = 0
    values: dict[str, Tensor] = field(default_factory=dict)

    def get(self, name: str, like: Tensor) -> Tensor:
        """A moment; zeros at first."""
        return self.values.setdefault(name, torch.zeros_like(like))


class Opinion:
    """A model that is trained, and the losses and norms that it has."""

    def __init__(self, folder: Path, training: Training, roundings: int = 0) -> None:
        """The model of a folder. Its weights are moved by so many roundings of float32, up or down at random."""
        from transformers import AutoModelForCausalLM

        way = {"attn_implementation": "eager", "experts_implementation": "eager"}
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **way).eval()
        self.training, self.num_updates, self.left_out = training, 0, 0
        self.named = dict(self.model.named_parameters())
        self.moments = {name: Moments() for name in self.named}
        self.frozen: frozenset[str] = frozenset()
        # Weights that had a gradient of a step which, in float32, would be nothing but rounding.
        self.faint: set[str] = set()
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for weight in self.named.values() if roundings else ():
                signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
                weight.mul_(1 + signs * roundings * 2.0**-23)

    def freeze(self, prefixes: Sequence[str]) -> None:
        """Train only what no prefix names from now on; nothing is remembered of what is not trained."""
        self.frozen = frozenset(name for name in self.named if name.startswith(tuple(prefixes)))
        for name in self.frozen:
            self.moments[name] = Moments()

    # Losses.

    def step(self, samples: Sequence[Sample]) -> tuple[float | None, float | None, float]:
        """Train on a global batch. The mean loss over its targets, the norm of the gradient and the balance loss; None,
        and no update, where there is no target."""
        self.model.zero_grad()
        num_targets, num_real = self._num_targets(samples), self._num_real(samples)
        if not num_targets:
            self.left_out += 1
            return None, None, 0.0
        answer = balance = 0.0
        size = self.training.microbatch_size
        for first in range(0, len(samples), size):
            total, pressure, seen = self._microbatch(samples[first : first + size])
            answer, balance = answer + float(total.detach()), balance + seen / num_real
            objective = total / num_targets + pressure / num_real
            if objective.requires_grad:
                objective.backward()
        gradients = {n: w.grad for n, w in self.named.items() if w.grad is not None and n not in self.frozen}
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
        faintest = 64 * UNIT * norm
        self.faint |= {name for name, gradient in gradients.items() if float(gradient.norm()) < faintest}
        clip = self.training.optimizer["clip_grad_norm"]
        factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        rate = self._rate()
        with torch.no_grad():
            for name, weight in self.named.items():
                if name not in self.frozen:
                    gradient = gradients.get(name)
                    self._update(
                        name, weight, torch.zeros_like(weight) if gradient is None else gradient * factor, rate
                    )
        self.num_updates += 1
        return answer / num_targets, norm, balance

    def evaluate(self, samples: Sequence[Sample]) -> float | None:
        """The mean loss over the targets of some samples."""
        num_targets = self._num_targets(samples)
        with torch.no_grad():
            return float(self._microbatch(samples)[0]) / num_targets if num_targets else None

    def _given(self, sample: Sample) -> Iterator[tuple[Document, int]]:
        """The documents of a sample, and how many tokens of each the model is given: the last of all is a target."""
        begin = 0
        for document in sample:
            yield document, min(len(document.ids), self.training.sequence - begin)
            begin += len(document.ids)

    def _num_targets(self, samples: Sequence[Sample]) -> int:
        return sum(sum(document.learned[1:]) for sample in samples for document in sample)

    def _num_real(self, samples: Sequence[Sample]) -> int:
        return sum(given for sample in samples for _, given in self._given(sample))

    def _microbatch(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor, float]:
        """The sum of the losses of some samples; and of their routers, times their numbers of tokens, with the part of
        it that keeps experts even."""
        total, pressure = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        routed: dict[str, list[list[Tensor]]] = {}
        for sample in samples:
            for seen in routed.values():
                seen.append([])
            for document, given in self._given(sample):
                if given <= 0:
                    continue
                logits_TV, gates = self._logits(document.ids[:given])
                for name, logits_TE in gates.items():
                    routed.setdefault(name, [[]])[-1].append(logits_TE)
                losses_T = logits_TV.logsumexp(-1)
                for at, (target, is_learned) in enumerate(zip(document.ids[1:], document.learned[1:], strict=True)):
                    if is_learned:
                        total = total + losses_T[at] - logits_TV[at, target]
        balance = 0.0
        for by_sample in routed.values():
            groups = [torch.cat(parts) for parts in by_sample if parts]
            if self.training.balance_scope == "microbatch":
                groups = [torch.cat(groups)] if groups else []
            for logits_TE in groups:
                if self.training.balance:
                    even = self.training.balance * self._balance(logits_TE) * len(logits_TE)
                    pressure, balance = pressure + even, balance + float(even.detach())
                pressure = pressure + self.training.z * logits_TE.logsumexp(-1).square().sum()
        return total, pressure, balance

    def _logits(self, ids: Sequence[int]) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits of a document, and those of its routers by name."""
        gates: dict[str, Tensor] = {}
        hooks = []
        if self.training.balance or self.training.z:
            for name, gate in self.model.named_modules():
                if name.endswith(".gate") and hasattr(gate, "weight"):

                    def note(gate: nn.Module, given: Any, name: str = name) -> None:
                        weight: Any = gate.weight
                        gates[name] = given[0].reshape(-1, weight.shape[-1]) @ weight.t()

                    hooks.append(gate.register_forward_pre_hook(note))
        logits_TV = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        for hook in hooks:
            hook.remove()
        return logits_TV, gates

    def _balance(self, logits_TE: Tensor) -> Tensor:
        """Switch's loss of some tokens (Fedus et al. 2022, equations 4 to 6)."""
        num_experts, num_chosen = logits_TE.shape[1], self.model.config.num_experts_per_tok
        likely_TE = logits_TE.softmax(-1)
        shares_E = torch.bincount(likely_TE.topk(num_chosen).indices.flatten(), minlength=num_experts).double()
        return num_experts * (shares_E / (len(logits_TE) * num_chosen) * likely_TE.mean(0)).sum()

    # Rates.

    def _rate(self) -> float:
        """The learning rate of the next update; steps without one are as if they had not been."""
        o, number = self.training.optimizer, self.num_updates
        peak, warmup, steps, schedule = o["learning_rate"], o["warmup_steps"], o["steps"] - self.left_out, o["schedule"]
        low = o["min_learning_rate_ratio"] * peak
        if number < warmup:
            return peak * (number + 1) / warmup
        if schedule == "constant":
            return peak
        if schedule == "inverse-sqrt":
            return max(low, peak * math.sqrt(max(1, warmup) / (number + 1)))
        first = warmup
        if schedule == "wsd":
            first, schedule = max(warmup, steps - max(1, round(o["decay_share"] * steps))), "linear"
        done = min(1.0, max(0.0, (number - first) / max(1, steps - first)))
        left = (1 + math.cos(math.pi * done)) / 2 if schedule == "cosine" else 1 - done
        return low + (peak - low) * left

    # Optimizers.

    def _update(self, name: str, weight: Tensor, g: Tensor, rate: float) -> None:
        o, moments = self.training.optimizer, self.moments[name]
        moments.number += 1
        kind = o["name"]
        decay = o["weight_decay"] if weight.dim() > 1 else 0.0
        if kind in ("muon", "adafactor"):
            in_layers = ".layers." in name and weight.dim() > 1
            if kind == "adafactor":
                step = self._adafactor(moments, weight, g)
            elif in_layers:
                m = moments.get("m", weight).lerp_(g, 1 - o["momentum"])
                step = orthogonal(g + o["momentum"] * (m - g)) * 0.2 * math.sqrt(max(weight.shape))
            else:
                step = self._adam_step(moments, weight, g)
            weight.mul_(1 - rate * decay).sub_(rate * step)
            return
        if kind in ("adam", "sgd"):
            g = g + decay * weight
        else:
            weight.mul_(1 - rate * decay)
        if kind == "sgd":
            weight.sub_(rate * moments.get("m", weight).mul_(o["momentum"]).add_(g))
        elif kind == "lion":
            m = moments.get("m", weight)
            weight.sub_(rate * (o["beta1"] * m + (1 - o["beta1"]) * g).sign())
            m.mul_(o["beta2"]).add_(g, alpha=1 - o["beta2"])
        else:
            weight.sub_(rate * self._adam_step(moments, weight, g))

    def _adam_step(self, moments: Moments, weight: Tensor, g: Tensor) -> Tensor:
        o, t = self.training.optimizer, moments.number
        m = moments.get("m", weight).mul_(o["beta1"]).add_(g, alpha=1 - o["beta1"])
        v = moments.get("v", weight).mul_(o["beta2"]).addcmul_(g, g, value=1 - o["beta2"])
        return m / (1 - o["beta1"] ** t) / ((v / (1 - o["beta2"] ** t)).sqrt() + o["epsilon"])

    def _adafactor(self, moments: Moments, weight: Tensor, g: Tensor) -> Tensor:
        """Shazeer and Stern 2018, algorithm 4, without momentum."""
        newest = moments.number**-0.8
        squares = g.square() + 1e-30
        if weight.dim() > 1:
            r = moments.get("r", weight[:, 0]).lerp_(squares.mean(1), newest)
            c = moments.get("c", weight[0]).lerp_(squares.mean(0), newest)
            u = g / (r[:, None] * c[None] / r.mean()).sqrt()
        else:
            u = g / moments.get("v", weight).lerp_(squares, newest).sqrt()
        u = u / max(1.0, float(u.square().mean().sqrt()))
        return u * max(1e-3, float(weight.square().mean().sqrt()))


def orthogonal(g: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz of a matrix."""
    x = g.t() if g.shape[0] > g.shape[1] else g
    x = x / max(float(x.norm()), 1e-7)
    a, b, c = QUINTIC
    for _ in range(steps):
        square = x @ x.t()
        x = a * x + (b * square + c * square @ square) @ x
    return x.t() if g.shape[0] > g.shape[1] else x


def sum_of_losses(model: Any, samples: Sequence[Sample], sequence: int) -> tuple[Tensor, int]:
    """The sum of the losses of some samples by any model of transformers, and the number of their targets: what a
    script of somebody's own would compute. All documents at once, each a row that is filled up behind its end, where no
    token before sees it: so every rank calls the model once."""
    rows, learned = list[tuple[int, ...]](), list[tuple[int, int, int]]()
    for sample in samples:
        begin = 0
        for document in sample:
            given = document.ids[: max(0, sequence - begin)]
            begin += len(document.ids)
            targets = zip(document.ids[1:], document.learned[1:], strict=True)
            learned += [(len(rows), at, target) for at, (target, is_learned) in enumerate(targets) if is_learned]
            rows.append((*given, *[0] * (sequence - len(given))))
    logits_DTV = model(input_ids=torch.tensor(rows), use_cache=False).logits.log_softmax(-1)
    return 0.0 * logits_DTV.sum() - sum(logits_DTV[place] for place in learned), len(learned)
