"""Cases of models from strangers: a folder with a config.json and files of weights, of which something is wrong.

`load` reads what a run that begins with such weights would, on one rank, with no process started.
"""

import io
import json
import sys
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).parents[1])

from fuzz import mutations as mutate
from fuzz.hostile import ADAPTER, Case

LOAD = "load-weights"  # in the place of a command: every element of a job's weights is read once
# A plan, for the best one of a thousand layers takes a minute.
_DEVICES = ["--devices", "8", "--device", "h100-sxm", "--set", "plan.dp=8", "--set", "plan.zero=1", "--json"]
_SEQUENCE = 16
_ODD_DTYPES = ["F8_E4M3", "F8_E5M2", "U8", "I8", "I64", "BF16", "F16", "F64", "BOOL", "F4", "", "f32"]
_ODD_ENDS = ["_scale_inv", "_scale", "_blocks", "_scales", "_packed", ""]


@lru_cache(maxsize=1)
def _families() -> dict[str, dict[str, Any]]:
    """Valid keys of a tiny model of every family."""
    from support.released_models import RELEASED

    return {name: {"model_type": family} | keys for name, (family, keys) in RELEASED.items()}


@lru_cache(maxsize=64)
def _tensors(name: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's tensors."""
    from shardwright.config.hugging_face.config_json import fields_of
    from shardwright.config.model import ModelSpec
    from shardwright.sharding.hugging_face.layout import correction_biases, layout_of

    keys = _families()[name]
    fields, faults = fields_of(keys)
    assert not faults, (name, faults)
    model = ModelSpec.model_validate(fields | {"sequence": _SEQUENCE})
    of = layout_of(keys["model_type"], model)
    pieces = [piece for held in of.values() for piece in held]
    pieces += correction_biases(keys["model_type"], model).values()
    return {piece.name: piece.shape for piece in pieces}


def config_case(random: Random) -> Case:
    """A config.json that is wrong, asked for a price."""
    keys = _config(random)
    raw = json.dumps(keys).encode()
    case = Case("config", [random.choice(["estimate", "simulate", "explain"]), "model", *_DEVICES])
    if case.arguments[0] == "explain":
        case.arguments.remove("--json")
    return case.put("model/config.json", mutate.broken(random, raw) if random.random() < 0.15 else raw)


def _config(random: Random) -> dict[str, Any]:
    keys = _families()[random.choice(list(_families()))]
    if random.random() < 0.2:
        keys = {"model_type": random.choice(["mistral3", "gemma3", "", "llama4"]), "text_config": keys}
    names = [
        "rope_scaling",
        "layer_types",
        "head_dim",
        "sliding_window",
        "num_experts",
        "tie_word_embeddings",
        "vocab_size",
    ]
    made = mutate.fields(random, keys, names) if random.random() < 0.9 else keys
    return made if isinstance(made, dict) else keys


def weights_case(random: Random) -> Case:
    """Files of weights that are wrong, converted or begun with."""
    name = random.choice(list(_families()))
    keys = _families()[name] if random.random() < 0.8 else _config(random)
    case = Case("weights", ["convert", "model", "--to", random.choice(["out", "out", "out.safetensors", "model"])])
    if random.random() < 0.5:
        case.arguments = [LOAD, "job.toml"]
        job = f'[model]\nweights = "model"\nsequence = {_SEQUENCE}\n'
        if random.random() < 0.4:
            job += '[model.adapter]\nrank = 2\nalpha = 4.0\ntargets = ["query", "value", "down"]\nweights = "adapter"\n'
            _put_adapter(random, case, name)
        case.put("job.toml", job)
    elif random.random() < 0.3:
        case.arguments += ["--dtype", random.choice(["bf16", "float32"]), "--file-gib", "0.001"]
    case.put("model/config.json", json.dumps(keys))
    tensors = {of: ("F32", shape) for of, shape in _tensors(name).items()}
    for _ in range(random.choice([0, 0, 1, 1, 3])):
        _change(random, tensors)
    if random.random() < 0.15:
        case.put("model/pytorch_model.bin", _harmed(random, _pickled(random, tensors)))
        return case
    names = list(tensors)
    cut = random.randrange(len(names) + 1) if random.random() < 0.3 else len(names)
    files = (
        {"model.safetensors": names}
        if cut == len(names)
        else {"a.safetensors": names[:cut], "b.safetensors": names[cut:]}
    )
    for file, held in files.items():
        case.put(f"model/{file}", _harmed(random, _safetensors(random, {of: tensors[of] for of in held})))
    if len(files) > 1 or random.random() < 0.1:
        index = {"weight_map": {of: file for file, held in files.items() for of in held}}
        text = json.dumps(mutate.fields(random, index, ["x"]) if random.random() < 0.4 else index).encode()
        case.put("model/model.safetensors.index.json", _harmed(random, text))
    if random.random() < 0.05:
        case.special[f"model/{random.choice(['model.safetensors', 'tokenizer.json', 'config.json'])}"] = random.choice(
            ["fifo", "sparse", "-> /dev/zero", "-> /proc", "-> loop", "-> gone"]
        )
        for odd in case.special:
            case.files.pop(odd, None)
    return case


def _put_adapter(random: Random, case: Case, name: str) -> None:
    """Put an adapter as peft writes it, of which something may be wrong; nothing for a model of which it has none."""
    from shardwright.config.base import PlanError
    from shardwright.config.hugging_face.config_json import fields_of
    from shardwright.config.model import ModelSpec
    from shardwright.sharding.hugging_face.adapter_layout import adapter_keys, adapter_layout

    keys = _families()[name]
    adapter = ADAPTER | {"targets": tuple(ADAPTER["targets"])}
    fields = fields_of(keys)[0] | {"sequence": _SEQUENCE, "adapter": adapter, "weights": "model"}
    model = ModelSpec.model_validate(fields)
    try:
        written, layout = adapter_keys(keys["model_type"], model), adapter_layout(keys["model_type"], model)
    except (PlanError, ValueError):
        return
    tensors = {piece.name: ("F32", piece.shape) for pieces in layout.values() for piece in pieces}
    if random.random() < 0.5:
        _change(random, tensors)
    printed = mutate.fields(random, written, ["r", "lora_alpha", "rank_pattern"]) if random.random() < 0.5 else written
    case.put("adapter/adapter_config.json", _harmed(random, json.dumps(printed).encode()))
    case.put("adapter/adapter_model.safetensors", _harmed(random, _safetensors(random, tensors)))


def _change(random: Random, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    name = random.choice(list(tensors))
    dtype, shape = tensors[name]
    kind = random.randrange(5)
    if kind == 0:
        del tensors[name]
        tensors[random.choice(["x", "", name + ".x", name * 9])] = (dtype, shape)
    elif kind == 1:
        tensors[name] = (random.choice(_ODD_DTYPES), shape)
    elif kind == 2:
        sizes = list(shape) or [1]
        sizes[random.randrange(len(sizes))] = random.choice([0, 1, 2, 3, 33, 1000])
        tensors[name] = (dtype, tuple(sizes))
    elif kind == 3:
        tensors[name + random.choice(_ODD_ENDS)] = (
            random.choice(_ODD_DTYPES),
            random.choice([shape, (1,), (), (1, 1)]),
        )
    else:
        tensors[name] = ("F8_E4M3", shape)
        tensors[name + random.choice(["_scale_inv", "_scale"])] = (
            random.choice(["F32", "F32", "BF16", "U8"]),
            random.choice([tuple(-(-size // 128) for size in shape), (1,), (), shape, (7,)]),
        )


def _safetensors(random: Random, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """A file of zeros; now and then its header says something else."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        num_bytes = _bytes_of(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + num_bytes]}
        at += num_bytes
    if random.random() < 0.15:
        header = mutate.fields(random, header, ["dtype", "shape", "data_offsets"])
    text = json.dumps(header).encode()
    length = len(text) if random.random() < 0.95 else random.choice([0, 1, 2**63, len(text) + 8, 2**31])
    return length.to_bytes(8, "little") + text + bytes(at)


def _bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    wide = {"F64": 8, "I64": 8, "F32": 4, "BF16": 2, "F16": 2}.get(dtype, 1)
    for size in shape:
        wide *= size
    return wide


def _pickled(random: Random, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> bytes:
    import torch

    file = io.BytesIO()
    held: Any = {name: torch.zeros(shape) for name, (_, shape) in tensors.items()}
    if random.random() < 0.2:
        held = random.choice([list(held.values()), held | {"x": [1]}, held | {3: torch.zeros(1)}, {"x": Path("y")}, 7])
    torch.save(held, file, _use_new_zipfile_serialization=random.random() < 0.8)
    return file.getvalue()


def _harmed(random: Random, raw: bytes) -> bytes:
    return mutate.broken(random, raw) if random.random() < 0.25 else raw


def load(arguments: list[str]) -> None:
    """Read the weights of a job, as a run of one rank does that begins with them. Exits with 2 where it is refused."""
    import torch

    from shardwright.config.base import PlanError
    from shardwright.config.load import load_job
    from shardwright.sharding.stage_parameters import model_parameters
    from shardwright.train.checkpoint.starting_weights import initial_values, released_weights_of

    try:
        job = load_job(arguments[1], [])
        released = released_weights_of(job)
        assert released is not None
        write = initial_values(job, released)
        untouched = 12345.678  # which no file that is made here holds
        for place in model_parameters(job.model):
            out = torch.full(place.shape, untouched).view(-1)
            write(place, 0, out)
            assert not (out == untouched).any(), "an element was not read"
        for block in range(job.model.layers):
            released.correction_bias(block)
    except PlanError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
