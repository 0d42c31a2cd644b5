"""A ResNet and an encoder of examples/, sharded by `shardwright.shard`, against torch's DDP and FSDP2.

    .venv/bin/python benchmarks/own_module.py                  # about 4 minutes
    .venv/bin/python benchmarks/own_module.py --rounds 3 --small

Two Gloo ranks of one thread each hold all systems at once and do one step of each in turn, as in zero.py: forward,
backward, reduction, clipping at 1.0 and fused AdamW in float32. FSDP2 shards the units that ours has. Before anything
is timed the losses and gradient norms of the first steps are compared.
"""

import argparse
import copy
import importlib.util
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from alternate import WORLD, ratio_text, run_two_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from zero import take_turns

import shardwright as sw
from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.zero.module_units import module_units

RATE, CLIP, CHECKED_STEPS = 1e-4, 1.0, 2
Step = Callable[[], tuple[float, float]]  # this rank's loss, and the norm of the gradient
Loss = Callable[[nn.Module], Tensor]


def main() -> None:
    """Measure both networks and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="most rounds")
    parser.add_argument("--seconds", type=float, default=90.0, help="of each network; no round ends later")
    parser.add_argument("--small", action="store_true", help="the sizes of the examples, to see that it works")
    asked = parser.parse_args()
    print("| network | system | time / DDP's [quartiles] | time / FSDP2's | processor time / DDP's | a second |")
    print("|" + " --- |" * 6)
    for name, unit in (("resnet", "images"), ("encoder", "tokens")):
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            file = Path(folder, "found.json")
            work = partial(measure, name=name, small=asked.small, rounds=asked.rounds, most_s=asked.seconds, file=file)
            run_two_ranks(work, {"plan": {"dp": WORLD}, "batch": {"global_batch_size": WORLD}})
            print_rows(name, unit, json.loads(file.read_text()))


def measure(mesh: Mesh, job: JobSpec, name: str, small: bool, rounds: int, most_s: float, file: Path) -> None:
    """Check all systems on this rank, then time them in turn."""
    torch.manual_seed(0)
    net, loss, number = (resnet if name == "resnet" else encoder)(small, mesh.rank)
    makers: dict[str, Callable[[nn.Module, Loss], Step]] = {"DDP": ddp, "FSDP2": fsdp2}
    makers |= {f"ours, ZeRO {zero}": partial(ours, zero=zero) for zero in range(4)}
    steps = {system: make(copy.deepcopy(net), loss) for system, make in makers.items()}
    expected = [steps["DDP"]() for _ in range(CHECKED_STEPS)]
    for system, step in steps.items():
        for its_loss, its_norm in expected if system != "DDP" else ():
            found_loss, found_norm = step()
            assert math.isclose(found_loss, its_loss, rel_tol=1e-4), f"{system}: loss {found_loss}, not {its_loss}"
            assert math.isclose(found_norm, its_norm, rel_tol=1e-3), f"{system}: norm {found_norm}, not {its_norm}"
    timed = take_turns(dict(steps), rounds, most_s)
    if mesh.rank == 0:
        file.write_text(json.dumps({"timed": timed, "number": WORLD * number, "elements": num_elements(net)}))


def resnet(small: bool, rank: int) -> tuple[nn.Module, Loss, int]:
    """The network, its loss on this rank's images, and how many these are."""
    of, number = example("resnet"), 8 if small else 64
    images, kinds = of.drawn_images(number, torch.Generator().manual_seed(rank))
    net = of.ResNet() if small else of.ResNet(width=48, depth=3)
    return net, lambda module: nn.functional.cross_entropy(module(images), kinds), number


def encoder(small: bool, rank: int) -> tuple[nn.Module, Loss, int]:
    """The network, its loss on this rank's tokens, and how many these are."""
    of, number, length = example("encoder"), 4 if small else 8, 48 if small else 128
    net = of.Encoder() if small else of.Encoder(width=384, depth=6, length=length)
    text = torch.arange(256).repeat(8)
    tokens, targets = of.hidden_bytes(text, number, length, torch.Generator().manual_seed(rank))

    def loss(module: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(module(tokens).flatten(0, 1), targets.flatten())

    return net, loss, number * length


def ours(net: nn.Module, loss: Loss, zero: int) -> Step:
    """A sharded module."""
    optimizer = {"name": "adamw", "learning_rate": RATE, "weight_decay": 0.0, "clip_grad_norm": CLIP}
    model = sw.shard(net, {"zero": zero}, optimizer=optimizer)

    def step() -> tuple[float, float]:
        result = loss(model)
        model.backward(result)
        return result.item(), model.step().grad_norm

    return step


def ddp(net: nn.Module, loss: Loss) -> Step:
    """DistributedDataParallel as fast as it gets: no buffers are sent, and gradients are reduced where they lie."""
    model = DistributedDataParallel(net, gradient_as_bucket_view=True, static_graph=True, forward_sync_buffers=False)
    return _stepped(model, loss)


def fsdp2(net: nn.Module, loss: Loss) -> Step:
    """fully_shard on the units that ours has, resharded after the forward, and on the root."""
    mesh = DeviceMesh("cpu", list(range(WORLD)))
    for unit in module_units(net).units.values():
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    fully_shard(net, mesh=mesh, reshard_after_forward=False)  # its backward begins at once
    return _stepped(net, loss)


def _stepped(model: nn.Module, loss: Loss) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step() -> tuple[float, float]:
        optimizer.zero_grad()
        result = loss(model)
        result.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return result.item(), (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()

    return step


def example(name: str) -> Any:
    """A program of examples/ as a module."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    result = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(result)
    return result


def num_elements(net: nn.Module) -> int:
    """Parameters of a network."""
    return sum(parameter.numel() for parameter in net.parameters())


def print_rows(name: str, unit: str, found: dict[str, Any]) -> None:
    """A row for each system."""
    timed = found["timed"]
    for system, times in timed.items():
        to_ddp, to_fsdp = (ratio_text(times["wall_s"], timed[other]["wall_s"]) for other in ("DDP", "FSDP2"))
        processor = ratio_text(times["cpu_s"], timed["DDP"]["cpu_s"])
        rate = f"{found['number'] / statistics.median(times['wall_s']):,.0f} {unit}"
        print(f"| {name}, {found['elements'] / 1e6:.2f} M | {system} | {to_ddp} | {to_fsdp} | {processor} | {rate} |")
    print(f"{len(timed['DDP']['wall_s'])} rounds of {name}", file=sys.stderr)


if __name__ == "__main__":
    main()
