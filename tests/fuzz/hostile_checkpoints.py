"""Cases of checkpoints from strangers: folders that are damaged, or made up by one who makes the digests right.

A damaged one must not load anything but what was saved; one that is made up may be another checkpoint, and must be
told or taken up like one. `resume` goes on from a folder as a rank of a run does, with no process started.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
import zlib
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).parents[1])

from fuzz import mutations as mutate
from fuzz.hostile import ADAPTER, TEXT, Case

RESUME = "resume"  # in the place of a command: what `train` does with the checkpoints of its folder, on one rank
LAST = 2  # steps of the run that wrote them: a checkpoint after each
JOB_FIELDS: dict[str, Any] = {
    "name": "tiny",
    "model": {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 2, "ffn": 24, "vocab": 260, "sequence": 16},
    "plan": {"dp": 1},
    "batch": {"global_batch_size": 2},
    "data": {"path": "text.txt", "tokenizer": "bytes"},
    "optimizer": {"steps": LAST + 1, "warmup_steps": 1},
    "run": {"sample_tokens": 0, "eval_every": 0, "folder": "run", "device": "cpu"},
    "checkpoint": {"every_steps": 1},
}
_VARIANTS: tuple[dict[str, dict[str, Any]], ...] = (
    {},
    {"precision": {"compute": "bf16", "float8": "delayed", "float8_history": 2}},
    {
        "precision": {"compute": "fp16", "loss_scale": 1024.0, "moments": "bf16"},
        "model": {"moe": {"experts": 4, "top_k": 2, "ffn": 8, "gate": "sigmoid", "bias_update": 0.01}},
    },
    {"model": {"vocab": 6000, "tied_embeddings": True}},  # files of more than a block
    {"model": {"adapter": ADAPTER}},  # which have the adapters alone
)
_DIGEST = 33  # the last line of what is signed


def job_fields(variant: int) -> dict[str, Any]:
    """The job of a folder of checkpoints."""
    fields = dict(JOB_FIELDS)
    for section, values in _VARIANTS[variant].items():
        fields[section] = fields.get(section, {}) | values
    return fields


@lru_cache(maxsize=1)
def whole_folders() -> tuple[dict[str, bytes], ...]:
    """The files of a folder of checkpoints for each variant, with what each holds; written in a process of its own, for
    what has computed with torch can't be forked everywhere."""
    results = []
    with tempfile.TemporaryDirectory(prefix="whole-") as scratch:
        subprocess.run([sys.executable, __file__, scratch], check=True, stdout=subprocess.DEVNULL)
        for variant in range(len(_VARIANTS)):
            folder = Path(scratch, str(variant))
            files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            results.append({str(path.relative_to(folder)): path.read_bytes() for path in files})
    return tuple(results)


def checkpoint_case(random: Random) -> Case:
    """A folder of two checkpoints of two files each, damaged or made up, and a command that reads it."""
    variant = random.choice([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 4, 4])
    files = dict(whole_folders()[variant])
    is_signed = random.random() < 0.5
    case = Case("signed" if is_signed else "damaged", [])
    steps = random.choice([[2], [2], [1, 2]])
    for step in steps:
        folder = f"run/checkpoints/step-{step:08d}"
        if is_signed:
            _make_up(random, files, folder)
        else:
            _damage(random, case, files, folder)
    expected = json.loads(files.pop("expected.json"))
    case.put("expected.json", json.dumps(expected | {"signed": is_signed}))
    case.put("job.toml", mutate.toml(job_fields(variant))).put("text.txt", TEXT)
    for name, contents in files.items():
        case.put(name, contents)
    if random.random() < 0.6:
        case.arguments = [RESUME, "job.toml"]
    else:
        case.arguments = ["checkpoint", random.choice(["ls", "show", "verify", "verify"]), "run"]
        case.arguments += ["--json"] * (random.random() < 0.5)
    return case


def _damage(random: Random, case: Case, files: dict[str, bytes], folder: str) -> None:
    """Change bytes, files or names, as accidents do, and who does not know of digests."""
    here = [name for name in files if name.startswith(folder)]
    name, other = random.sample(here, 2)
    match random.randrange(12):
        case 0:
            del files[name]
        case 1:
            files[name], files[other] = files[other], files[name]
        case 2:
            files[name] = files[other]
        case 3:
            number = random.choice(["00000003", "00000009", "99999999", "000000002", "9999999999", "٠٠٠٠٠٠٠٣"])
            for one in here:
                files[one.replace(folder, f"run/checkpoints/step-{number}")] = files[one]
        case 4:
            files["run/checkpoints/latest"] = mutate.broken(random, files["run/checkpoints/latest"])
        case 5:
            del files[name]
            case.special[name] = random.choice(["fifo", "sparse", "-> /dev/zero", "-> /proc", f"-> {Path(other).name}"])
        case 6:
            files[name] = files[name][: random.randrange(len(files[name]))]
        case 7:
            files[name] += random.randbytes(random.choice([1, 8, 1 << 20]))
        case 8:
            at = random.randrange(len(files[name]))
            files[name] = files[name][:at] + bytes([files[name][at] ^ 1 << random.randrange(8)]) + files[name][at + 1 :]
        case _:
            files[name] = mutate.broken(random, files[name])


def _make_up(random: Random, files: dict[str, bytes], folder: str) -> None:
    """Change what a manifest or an index says, or the values, and make every digest and sum right again."""
    manifest = _parsed(files[f"{folder}/manifest.json"])
    names = [note["index"] for note in manifest["files"]]
    if random.random() < 0.4:
        manifest = _other_manifest(random, manifest)
    else:
        for name in random.choice([names, names[:1], names[1:]]):
            data = name.replace(".json", ".safetensors")
            index, values = _other_index(
                random, _parsed(files[f"{folder}/{name}"]), bytearray(files[f"{folder}/{data}"])
            )
            files[f"{folder}/{data}"] = bytes(values)
            files[f"{folder}/{name}"] = _signed(index)
    if isinstance(manifest, dict) and isinstance(manifest.get("files"), list):
        for note in manifest["files"]:
            name = note.get("index") if isinstance(note, dict) else None
            if isinstance(name, str) and f"{folder}/{name}" in files:
                note["digest"] = blake2b(files[f"{folder}/{name}"], digest_size=16).hexdigest()
                index = _parsed(files[f"{folder}/{name}"])
                if isinstance(index, dict) and random.random() < 0.95:
                    note["num_bytes"] = index.get("num_bytes")
    files[f"{folder}/manifest.json"] = _signed(manifest)


def _parsed(data: bytes) -> Any:
    return json.loads(data[:-_DIGEST])


def _signed(value: Any) -> bytes:
    body = json.dumps(value).encode() + b"\n"
    return body + blake2b(body, digest_size=16).hexdigest().encode() + b"\n"


_LARGE = (0, 1, 2, 3, 2**31, 2**40, 2**60, 2**62 - 1, 2**62, 2**63, 2**64)


def _other_manifest(random: Random, manifest: dict[str, Any]) -> Any:
    job, state = manifest["job"], manifest["state"]
    match random.randrange(12):
        case 0:
            manifest["optimizer_steps"] = random.choice(_LARGE)
        case 1:
            manifest[random.choice(["samples", "passed_over", "step"])] = random.choice(_LARGE)
        case 2:
            manifest["job"] = mutate.fields(random, job, ["model", "plan"])
        case 3:
            section = random.choice(list(job))
            job[section] = mutate.value(random, job[section])
        case 4:
            job["plan"][random.choice(["dp", "zero", "schedule"])] = random.choice(["\x1b[2J", {}, [1], "x" * 10**5])
        case 5:
            manifest["files"].append(random.choice(manifest["files"]))
        case 6:
            del manifest["files"][random.randrange(len(manifest["files"]))]
        case 7:
            note = random.choice(manifest["files"])
            note["index"] = random.choice(["../rank-00000.json", "rank-00002.json", "/etc/passwd", "rank-٠٠٠٠٠.json"])
        case 8 | 9:
            manifest["state"] = mutate.fields(random, state, ["health", "loss_scale", "judge"])
        case _:
            return mutate.fields(random, manifest, ["state", "job", "files"])
    return manifest


def _other_index(random: Random, index: dict[str, Any], values: bytearray) -> tuple[Any, bytearray]:
    boxes: list[Any] = index["boxes"]
    one, other = random.sample(boxes, 2) if len(boxes) > 1 else (boxes[0], boxes[0])
    match random.randrange(14):
        case 0:
            at = random.randrange(len(values))
            values[at] ^= 1 << random.randrange(8)
        case 1:
            values[one["start_byte"] : one["start_byte"] + 8] = random.choice([b"\xff", b"\x7f", b"\0"]) * 8
        case 2:  # a tensor of any size, of which there is one box
            size = random.choice(_LARGE)
            for box in boxes:
                if box["name"] == one["name"]:
                    box["full_shape"] = [size, *box["full_shape"][1:]]
        case 3:
            size = random.choice(_LARGE)
            one["full_shape"], one["box"] = [size], [[0, size]]
        case 4:  # and the bytes for it, as far as sums go
            size = random.choice([2**22, 2**28, 2**36])
            index["num_bytes"] = size
            index["sums"] = index["sums"] + [0] * (-(-min(size, 2**32) // 2**20) - len(index["sums"]))
            one["full_shape"], one["box"] = [size // 8], [[0, size // 8]]
        case 5:
            one["start_byte"] = other["start_byte"]
        case 6:
            one["box"] = other["box"]
        case 7:
            one["name"] = random.choice([other["name"], "weights.x", "float8.x", "", "\x1b", one["name"].upper()])
        case 8:
            one["dtype"] = random.choice(["F64", "BF16", "I64", "BOOL", "U8", "Q8", ""])
        case 9:
            prefix, new = random.choice(["exp_avg.", "exp_avg_sq.", "weights.", "router.", "float8."]), "step."
            index["boxes"] = [box | {"name": box["name"].replace(prefix, new)} for box in boxes]
        case 10:
            kept = [box for box in boxes if not box["name"].startswith(random.choice(["exp_avg", "router", "float8"]))]
            index["boxes"] = kept
        case 11:
            some = [box for box in boxes if box["name"].startswith(("float8.", "router."))] or boxes
            box = random.choice(some)
            box["full_shape"], box["box"] = random.choice([([], []), ([1], [[0, 1]]), ([0], [[0, 0]]), ([1, 1], [])])
        case 12:
            boxes.append(random.choice(boxes) | {"name": random.choice(["weights.y", "exp_avg.y", one["name"]])})
        case _:
            index = mutate.fields(random, index, ["name", "box", "full_shape", "dtype", "start_byte"])
            return index, values
    index["sums"] = [zlib.crc32(values[at : at + 2**20]) for at in range(0, len(values), 2**20)] + index["sums"][
        -(-len(values) // 2**20) :
    ]
    return index, values


# Work on a folder. From here on with torch.


def resume(arguments: list[str]) -> None:
    """Go on to the end of the job; assert that what was loaded is what was saved, where nobody made the sums right."""
    import torch

    from shardwright.config.base import PlanError, RunError
    from shardwright.config.load import load_job
    from shardwright.train.build import job_mesh
    from shardwright.train.trainer import train_steps
    from shardwright.train.training_run import RunStart, TrainingRun

    torch.set_num_threads(1)
    expected = json.loads(Path("expected.json").read_text())
    try:
        job = load_job(arguments[1], [])
        run = TrainingRun(job, job_mesh(job, 0, torch.device("cpu")), Path("run"), RunStart())
        if not expected["signed"]:
            assert _state_of(run) == expected[str(run.done)], f"what was loaded of step {run.done} was not saved"
        train_steps(run)
    except (PlanError, RunError) as error:
        print(error, file=sys.stderr)
        sys.exit(2 if isinstance(error, PlanError) else 1)


def _state_of(run: Any) -> str:
    """A digest of all that a run remembers."""
    import torch

    from shardwright.train.checkpoint.saved_state import SavedState
    from shardwright.train.checkpoint.state_part import optimizer_steps

    scale = run.replica.loss_scale
    states = [scale.state_dict() if scale else {}, run.health.state_dict()]
    numbers = [run.done, run.samples, run.passed_over, optimizer_steps(run.replica), *states]
    digest = blake2b(json.dumps(numbers).encode())
    for box in sorted(SavedState(run.replica, run.mesh).held(), key=lambda box: (box.name, box.box)):
        digest.update(f"{box.name} {box.full_shape} {box.box} {box.values.dtype}".encode())
        digest.update(box.values.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _write_whole(root: Path, variant: int) -> None:
    """Train, and write a checkpoint of two files after each step."""
    import os

    import torch

    from shardwright.config.load import make_job
    from shardwright.train.build import job_mesh
    from shardwright.train.checkpoint.boxes import save_boxes
    from shardwright.train.checkpoint.kept import make_whole
    from shardwright.train.checkpoint.manifest import Manifest, MeasuredLoss, folder_name
    from shardwright.train.checkpoint.saved_state import SavedState
    from shardwright.train.checkpoint.state_part import optimizer_steps
    from shardwright.train.checkpoint.storage import open_storage
    from shardwright.train.training_run import RunStart, TrainingRun

    torch.set_num_threads(1)
    root.mkdir()
    os.chdir(root)
    Path("text.txt").write_text(TEXT)
    job = make_job(tomllib.loads(mutate.toml(job_fields(variant))))
    mesh = job_mesh(job, 0, torch.device("cpu"))
    silent = make_job(tomllib.loads(mutate.toml(job_fields(variant) | {"checkpoint": {}})))
    run = TrainingRun(silent, mesh, Path("scratch"), RunStart())
    expected = {"0": _state_of(run)}
    storage = open_storage("run/checkpoints")
    for step in range(1, LAST + 1):
        run.count(run.train_span())
        expected[str(step)] = _state_of(run)
        scale = run.replica.loss_scale
        state = {"health": run.health.state_dict()} | ({"loss_scale": scale.state_dict()} if scale else {})
        halves = [half for box in SavedState(run.replica, mesh).held() for half in _halves(box)]
        for rank in range(2):
            save_boxes(halves[rank::2], storage, folder_name(step), rank)
        manifest = Manifest(
            step=step, samples=step * job.batch.global_batch_size, optimizer_steps=optimizer_steps(run.replica),
            job=job.model_dump(mode="json"), state=state, data=run.place.to_store(run.samples),
            losses={"held-out": MeasuredLoss(loss=float(step), set_digest="0" * 32)}, files=(),
        )  # fmt: skip
        make_whole(storage, manifest, 2)
    Path("expected.json").write_text(json.dumps(expected))
    Path("text.txt").unlink()
    for path in sorted(Path("scratch").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def _halves(held: Any) -> list[Any]:
    """A box as two, cut in its first dim where there is one to cut."""
    from dataclasses import replace

    if not held.box or held.values.shape[0] < 2:
        return [held]
    (start, stop), *rest = held.box
    middle = (start + stop) // 2
    cut = middle - start
    return [
        replace(held, box=((start, middle), *rest), values=held.values[:cut].contiguous()),
        replace(held, box=((middle, stop), *rest), values=held.values[cut:].contiguous()),
    ]


if __name__ == "__main__":
    for number in range(len(_VARIANTS)):
        _write_whole(Path(sys.argv[1]).absolute() / str(number), number)
