"""A part of one's own module that is frozen for some steps: when it is trained again, its moments and its count of
steps begin anew, under every optimizer and stage of ZeRO, and a checkpoint has both."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.config.optimizer import OptimizerSpec
from shardwright.parallel.optimizers.elementwise import make_optimizer
from support.ranks import in_group, leaves_nothing, run_ranks

RATE = 1e-2
SPECS: dict[str, dict[str, Any]] = {
    "adamw": {"beta2": 0.999, "weight_decay": 0.1},
    "adam": {"weight_decay": 0.1},
    "lion": {"weight_decay": 0.1},
    "sgd": {"momentum": 0.9, "weight_decay": 0.1},
}
# Steps up to which each phase goes, and the parts that are frozen in it: `head` twice, and `body` from the beginning.
PHASES: tuple[tuple[int, frozenset[str]], ...] = (
    (2, frozenset({"body"})), (4, frozenset({"head"})), (6, frozenset()), (7, frozenset({"head"})), (10, frozenset()),
)  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(torch.tanh(self.body(x)))))


def net_of(frozen: frozenset[str]) -> Net:
    torch.manual_seed(0)
    net = Net()
    for part in frozen:
        net.get_submodule(part).requires_grad_(False)
    return net


def loss_of(model: nn.Module, step: int, rank: int, world: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(8, n, generator=generator) for n in (4, 1))
    dtype = next(model.parameters()).dtype
    own = slice(rank * 8 // world, (rank + 1) * 8 // world)
    return (model(x[own].to(dtype)) - y[own].to(dtype)).square().mean()


def plainly_trained(name: str) -> dict[str, Tensor]:
    """One loop in float64, whose state of a part that is frozen is forgotten."""
    spec, net = SPECS[name], net_of(frozenset()).double()
    beta1, beta2 = 0.9, spec.get("beta2", 0.95)
    first, state = 0, dict[str, tuple[int, Tensor, Tensor]]()
    for end, frozen in PHASES:
        state = {key: of for key, of in state.items() if key.split(".")[0] not in frozen}
        for step in range(first, end):
            net.zero_grad()
            loss_of(net, step, 0, 1).backward()
            for key, weight in net.named_parameters():
                if key.split(".")[0] in frozen:
                    continue
                t, m, v = state.get(key, (0, torch.zeros_like(weight), torch.zeros_like(weight)))
                decay, g = (spec["weight_decay"] if weight.dim() > 1 else 0.0), weight.grad
                with torch.no_grad():
                    t += 1
                    if name in ("adam", "sgd"):
                        g = g + decay * weight
                    if name in ("adamw", "lion"):
                        weight.mul_(1 - RATE * decay)
                    if name == "sgd":
                        m = 0.9 * m + g
                        weight.sub_(RATE * m)
                    elif name == "lion":
                        weight.sub_(RATE * (beta1 * m + (1 - beta1) * g).sign())
                        m = beta2 * m + (1 - beta2) * g
                    else:
                        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
                        weight.sub_(RATE * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + 1e-5))
                state[key] = t, m, v
        first = end
    return {key: of.detach() for key, of in net.named_parameters()}


@leaves_nothing
def sharded(rank: int, world: int, name: str, plans: list[dict[str, Any]], folder: str) -> dict[str, Tensor]:
    """The phases in turn, each of a module of its own that loads what the one before saved; and within the longest ones
    once more in the middle."""
    spec = {"name": name, "learning_rate": RATE, "clip_grad_norm": 0.0, "epsilon": 1e-5, **SPECS[name]}
    first, model = 0, None
    for number, (end, frozen) in enumerate(PHASES):
        for start, stop in ((first, end - 1), (end - 1, end)):
            model = sw.shard(net_of(frozen), plan=plans[number % len(plans)], optimizer=spec)
            if start:
                assert model.load(folder) == start
            for step in range(start, stop):
                model.backward(loss_of(model, step, rank, world))
                model.step()
            model.save(folder)
        first = end
    return model.state_dict()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SPECS)
def test_moments_begin_anew(name: str, tmp_path: Path) -> None:
    plans = [{"zero": zero, "bucket_mib": 1e-3} for zero in (1, 0, 3, 2)]
    wanted = plainly_trained(name)
    for key, of in sharded(0, 1, name, plans, str(tmp_path)).items():
        # A sign may turn where an element is nearly 0; these are not.
        assert float((of - wanted[key]).abs().max()) < 1e-4 * RATE * 10, key


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_moments_begin_anew_on_two_ranks(name: str, tmp_path: Path) -> None:
    plans = [{"zero": 3}, {"zero": 1, "offload_optimizer": 0.5}, {"zero": 2}]
    wanted = plainly_trained(name)
    for state in run_ranks(2, in_group, 2, sharded, name, plans, str(tmp_path)):
        assert max(float((of - wanted[key]).abs().max()) for key, of in state.items()) < 1e-4 * RATE * 10


def test_another_run_is_not_remembered(tmp_path: Path) -> None:
    """A module that has trained already takes up a checkpoint of which a part was frozen."""
    spec = {"name": "adamw", "learning_rate": RATE, "clip_grad_norm": 0.0}
    frozen = sw.shard(net_of(frozenset({"head"})), optimizer=spec)
    frozen.backward(loss_of(frozen, 0, 0, 1))
    frozen.step()
    frozen.save(tmp_path)
    after = []
    for steps_before in (0, 3):
        model = sw.shard(net_of(frozenset()), optimizer=spec)
        for step in range(steps_before):
            model.backward(loss_of(model, step, 0, 1))
            model.step()
        model.load(tmp_path)
        model.backward(loss_of(model, 1, 0, 1))
        model.step()
        after.append(model.state_dict())
    assert all(torch.equal(of, after[1][key]) for key, of in after[0].items())


def test_elements_count_steps_of_their_own() -> None:
    """Spans that overlap: the last one said holds."""
    weight = torch.zeros(10)
    optimizer = make_optimizer(OptimizerSpec(), [weight], [])
    optimizer.go_on_after(9)
    for start, stop, number in ((0, 4, 3), (2, 8, 5), (4, 5, 7), (8, 8, 1)):
        optimizer.count_after(weight, start, stop, number)
    assert optimizer._spans_of(weight) == [(0, 2, 3), (2, 4, 5), (4, 5, 7), (5, 8, 5), (8, 10, 0)]
