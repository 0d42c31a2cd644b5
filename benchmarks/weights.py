"""How fast weights of a Hugging Face folder come into the boxes of a plan, beside the disk's own rate.

    .venv/bin/python benchmarks/weights.py       # about a minute, 2 GB of disk and 9 GB of memory

A Llama of 0.95 billion parameters in bf16, in files of 0.5 GB, goes into the float32 boxes of tp 2 x pp 2, from a cold
cache: from the first look into the folder to the last weight, into the memory that is there for them. In turn with it
the same files are read from the first byte to the last, by as many ranks, and nothing else is done. *Memory* is what
was resident more than before, at the worst moment.
"""

import argparse
import json
import os
import tempfile
from functools import partial
from pathlib import Path

import torch
from alternate import run_ranks
from checkpoint import print_reads, read_bytes, read_in_turn
from safetensors.torch import save_file

from shardwright.config.hugging_face.config_json import read_model
from shardwright.config.hugging_face.written_config import written_config
from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.parameter import placed_parameters
from shardwright.sharding.hugging_face.layout import layout_of
from shardwright.train.build import Replica, build
from shardwright.train.checkpoint.starting_weights import released_weights_of

MODEL = {"layers": 16, "hidden": 2048, "heads": 16, "ffn": 5632, "vocab": 32000, "sequence": 16}
PLAN = {"tp": 2, "pp": 2}
FILE_BYTES = 500_000_000


def main() -> None:
    """Write a folder, read it in turn both ways, and print a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--layers", type=int, default=MODEL["layers"])
    parser.add_argument("--folder", default=None, help="where the files lie; a temporary folder")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=asked.folder) as folder:
        write_folder(Path(folder, "model"), asked.layers)
        job = {"model": read_model(f"{folder}/model") | {"sequence": 16, "weights": f"{folder}/model"}, "plan": PLAN}
        work = partial(_on_a_rank, rounds=asked.rounds, folder=Path(folder))
        run_ranks(work, job, PLAN["tp"] * PLAN["pp"])
        print_reads(json.loads(Path(folder, "found.json").read_text()), "into tp 2 x pp 2")


def write_folder(folder: Path, layers: int) -> None:
    """A Llama's folder, of random weights in bf16."""
    model = make_job({"model": MODEL | {"layers": layers}}).model
    family, keys = written_config(model)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(keys))
    held: dict[str, torch.Tensor] = {}
    names: dict[str, str] = {}
    number = 0
    pieces = {piece.name: piece.shape for of in layout_of(family, model).values() for piece in of}
    for name, shape in pieces.items():
        held[name] = torch.randn(shape, dtype=torch.bfloat16)
        names[name] = f"model-{number:05d}.safetensors"
        if sum(tensor.nbytes for tensor in held.values()) > FILE_BYTES or name == list(pieces)[-1]:
            save_file(held, folder / names[name])
            held, number = {}, number + 1
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    os.sync()


def _on_a_rank(mesh: Mesh, job: JobSpec, rounds: int, folder: Path) -> None:
    """Read the files and the weights in turn, and leave what was measured in found.json."""
    files = sorted((folder / "model").glob("*.safetensors"))
    replica = build(job, mesh)
    reads = {"files": partial(read_bytes, files[mesh.rank :: mesh.world.size]), "boxes": partial(_load, job, replica)}
    read_in_turn(mesh, reads, files, rounds, folder)


def _load(job: JobSpec, replica: Replica) -> None:
    """The weights of the folder into the boxes of this rank."""
    released = released_weights_of(job)
    assert released is not None
    for stage in replica.stages.values():
        for parameter in placed_parameters(stage).values():
            released.write(parameter.place, 0, parameter.detach().view(-1))


if __name__ == "__main__":
    main()
