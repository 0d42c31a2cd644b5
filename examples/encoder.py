"""An encoder of one's own under ZeRO 3: it fills in bytes that are hidden in a text, which is this file.

    python examples/encoder.py
    torchrun --standalone --nproc-per-node 2 examples/encoder.py --zero 3 --bf16

The network is an ordinary module, with layers of torch (Vaswani et al. 2017, arXiv 1706.03762) and one table for the
bytes that go in and those that come out.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwright as sw

HIDDEN = 256  # what stands for a byte that is hidden


class Encoder(nn.Module):
    """Layers that see a whole text, and a guess at each of its bytes."""

    def __init__(self, width: int = 32, depth: int = 2, length: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(HIDDEN + 1, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, HIDDEN + 1, bias=False)
        self.head.weight = self.embedding.weight  # one table, used twice
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def hidden_bytes(text: Tensor, number: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pieces of a text with an eighth of the bytes hidden, and what was there; -100 where nothing was hidden."""
    starts = torch.randint(len(text) - length, (number, 1), generator=generator)
    whole = text[starts + torch.arange(length)]
    is_hidden = torch.rand(whole.shape, generator=generator) < 1 / 8
    return whole.masked_fill(is_hidden, HIDDEN), whole.masked_fill(~is_hidden, -100)


def main() -> None:
    """Train, and say how it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--bf16", action="store_true", help="compute in bf16, with float32 weights in the optimizer")
    asked = parser.parse_args()

    torch.manual_seed(0)
    model = sw.shard(
        Encoder(),
        plan={"zero": asked.zero},
        optimizer={"name": "adamw", "learning_rate": 1e-2, "steps": asked.steps, "schedule": "cosine"},
        precision={"compute": "bf16" if asked.bf16 else "float32"},
    )

    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(rank)  # each rank sees pieces of its own
    text = torch.tensor(list(Path(__file__).read_bytes()))
    for _ in range(asked.steps):
        tokens, targets = hidden_bytes(text, 16, 48, generator)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        step = model.step()
        if rank == 0 and step.number % 10 == 0:
            print(f"step {step.number}: loss {loss.item():.3f}, gradient {step.grad_norm:.2f}")
    if rank == 0:
        print(f"this rank holds {model.memory()}")


if __name__ == "__main__":
    main()
