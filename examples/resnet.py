"""A ResNet of one's own under ZeRO 3, on images that are drawn here: alone, or on several ranks.

    python examples/resnet.py
    torchrun --standalone --nproc-per-node 2 examples/resnet.py --zero 3

The network is an ordinary module (He et al. 2016, arXiv 1512.03385, section 4.2). One call puts it under data parallel.
"""

import argparse
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwright as sw


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norms = nn.ModuleDict({"first": norm(outputs), "second": norm(outputs)})
        self.relu = nn.ReLU(inplace=True)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norms["first"](self.first(x)))
        return self.relu(self.norms["second"](self.second(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Three groups of blocks, each with half the resolution of the one before, and a classifier."""

    def __init__(self, width: int = 8, depth: int = 2, norm: type[nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), norm(width), nn.ReLU(inplace=True))
        widths = [width, width, 2 * width, 4 * width]
        self.groups = nn.ModuleList(
            nn.Sequential(*(Block(of if i else before, of, 1 if i or before == of else 2, norm) for i in range(depth)))
            for before, of in pairwise(widths)
        )
        self.head = nn.Linear(widths[-1], 4)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for group in self.groups:
            x = group(x)
        return self.head(x.mean(dim=(2, 3)))


def drawn_images(number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noisy images, 16 x 16, of a bar that lies, stands, falls or rises; and which it is."""
    kinds = torch.randint(4, (number,), generator=generator)
    places = torch.randint(3, 13, (number, 1, 1), generator=generator)
    rows, columns = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    lines = torch.stack([rows - places, columns - places, rows - columns + places - 8, rows + columns - places - 8])
    images = (lines.gather(0, kinds.view(1, -1, 1, 1).expand(1, -1, 16, 16))[0].abs() <= 1).float()
    return (images + 0.5 * torch.randn(images.shape, generator=generator)).unsqueeze(1), kinds


def main() -> None:
    """Train, and say how it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save", default="", help="a folder for a checkpoint at the end")
    asked = parser.parse_args()

    torch.manual_seed(0)
    model = sw.shard(ResNet(), plan={"zero": asked.zero}, optimizer={"name": "adamw", "learning_rate": 1e-2})

    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(rank)  # each rank sees images of its own
    for _ in range(asked.steps):
        images, kinds = drawn_images(32, generator)
        loss = nn.functional.cross_entropy(model(images), kinds)
        loss.backward()
        step = model.step()
        if rank == 0 and step.number % 10 == 0:
            print(f"step {step.number}: loss {loss.item():.3f}, gradient {step.grad_norm:.2f}")
    if rank == 0:
        print(f"this rank holds {model.memory()}")
    if asked.save:
        model.save(asked.save)


if __name__ == "__main__":
    main()
