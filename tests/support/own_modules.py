"""Modules that are not ours, and one process that computes what their replicas do, rank after rank."""

import copy
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.config.optimizer import OptimizerSpec
from shardwright.parallel.optimizers.elementwise import make_optimizer

EXAMPLES = Path(__file__).parents[2] / "examples"
Loss = Callable[[Any, int], Tensor]  # of a module that is called, for a number that says on what


def example(name: str) -> Any:
    """A program of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    result = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(result)
    return result


class Pair(NamedTuple):
    """Two tensors, nested."""

    left: Tensor
    right: dict[str, Tensor]


class Mixed(nn.Module):
    """A layer with two inputs, one by name, and nested outputs. It overwrites its first input, and has a parameter
    that is not always used and one that is frozen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.rare, self.frozen = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, *, beside: Tensor, use_rare: bool) -> Pair:
        x = x.relu_() * (self.scale * self.scale * self.frozen)
        right = torch.tanh(self.right(beside + x))
        return Pair(self.left(x) * self.rare if use_rare else self.left(x), {"right": right})


class Tricky(nn.Module):
    """A module hard to shard: a layer that is used twice, a matrix that two modules share, parameters of the root,
    one that a layer never uses, nested inputs and outputs, running statistics."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixed(width) for _ in range(3))
        self.norm, self.bias = nn.BatchNorm1d(width), nn.Parameter(torch.zeros(width))
        self.head = nn.Linear(width, width, bias=False)
        self.layers[1].left.weight = self.head.weight
        self.layers[0].right.weight = self.layers[2].right.weight
        self.unused = nn.Linear(width, width)

    def forward(self, x: Tensor, use_rare: bool) -> dict[str, Tensor]:
        left, right = x + self.bias, x
        for layer in (self.layers[0], self.layers[1], self.layers[0], self.layers[2]):
            left, of = layer(left, beside=right, use_rare=use_rare)
            right = of["right"]
        return {"out": self.head(self.norm(left)), "aside": right}


def resnet_loss(norm: type[nn.Module] = nn.BatchNorm2d) -> tuple[nn.Module, Loss]:
    """A small ResNet of examples/, and its loss on some images."""
    of = example("resnet")
    torch.manual_seed(0)
    net = of.ResNet(width=4, depth=1, norm=norm)

    def loss(module: Any, number: int) -> Tensor:
        images, kinds = of.drawn_images(4, torch.Generator().manual_seed(number))
        return nn.functional.cross_entropy(module(images), kinds)

    return net, loss


def encoder_loss() -> tuple[nn.Module, Loss]:
    """A small encoder of examples/, and its loss on pieces of a text."""
    of = example("encoder")
    torch.manual_seed(0)
    net = of.Encoder(width=16, depth=2, length=8)
    text = torch.arange(256).repeat(2)

    def loss(module: Any, number: int) -> Tensor:
        tokens, targets = of.hidden_bytes(text, 3, 8, torch.Generator().manual_seed(number))
        return nn.functional.cross_entropy(module(tokens).flatten(0, 1), targets.flatten())

    return net, loss


def tricky_loss() -> tuple[nn.Module, Loss]:
    """The module that makes sharding hard; its rare parameters are used by every other loss."""
    torch.manual_seed(0)
    net = Tricky()

    def loss(module: Any, number: int) -> Tensor:
        x = torch.randn(5, 12, generator=torch.Generator().manual_seed(number))
        result = module(x, use_rare=number % 2 == 0)
        return result["out"].square().mean() + result["aside"].mean()

    return net, loss


MODULES: dict[str, Callable[[], tuple[nn.Module, Loss]]] = {
    "resnet": resnet_loss, "encoder": encoder_loss, "tricky": tricky_loss,
}  # fmt: skip


def trained_in_turn(
    net: nn.Module, loss: Loss, world: int, steps: int, optimizer: OptimizerSpec, accumulate: int = 1
) -> list[nn.Module]:
    """The `world` replicas of a module after some steps, computed by one process: each replica's gradients one after
    the other, and one update of their mean. Gradients of pairs are added first, as ranks of hybrid sharding
    add them."""
    replicas = [copy.deepcopy(net) for _ in range(world)]
    trained = [[p for p in of.parameters() if p.requires_grad] for of in replicas]
    decayed, plain = ([p for p in trained[0] if (p.dim() > 1) == of] for of in (True, False))
    update = make_optimizer(optimizer, [p.detach().view(-1) for p in decayed], [p.detach() for p in plain])
    flat = [of for group in update.param_groups for of in group["params"]]
    for step in range(steps):
        for rank, replica in enumerate(replicas):
            replica.zero_grad()
            for number in range(accumulate):
                loss(replica, batch_number(world, rank, step * accumulate + number)).backward()
        sums = [_in_pairs([_gradient(of[i]) for of in trained]) for i in range(len(trained[0]))]
        by_parameter = dict(zip(trained[0], sums, strict=True))
        for parameter, of in zip([*decayed, *plain], flat, strict=True):
            of.grad = by_parameter[parameter].mul_(1 / (world * accumulate)).view(-1)
        for group in update.param_groups:
            group["lr"] = optimizer.learning_rate
        update.step()
        for other in trained[1:]:
            for parameter, first in zip(other, trained[0], strict=True):
                parameter.data.copy_(first.data)
    return replicas


def batch_number(world: int, rank: int, number: int) -> int:
    """Which batch a rank has."""
    return 2 * number * world + rank + number % 2


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def _in_pairs(gradients: Sequence[Tensor]) -> Tensor:
    while len(gradients) > 1:
        pairs = zip(gradients[::2], gradients[1::2], strict=True)
        gradients = [first + second for first, second in pairs]
    return gradients[0]
