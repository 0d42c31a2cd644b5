"""A folder of weights in another number type, in safetensors files of another size: a stream from folder to folder.

Quantised weights become plain ones, and pickled files safetensors; names, layouts and all keys of config.json but the
number type stay. Memory is that of a part of a tensor.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from shardwright.config.hugging_face.config_json import CONFIG, read_keys
from shardwright.config.hugging_face.written_config import config_bytes
from shardwright.train.checkpoint.export import EXPORTED, TORCH, write_values
from shardwright.train.checkpoint.released_companions import companions
from shardwright.train.checkpoint.safetensors_folder import Files, WrittenTensor, write_safetensors
from shardwright.train.checkpoint.stored_weights import PlainTensor, StoredFiles, plain_tensors, stored_files

_DTYPE_KEYS = ("dtype", "torch_dtype")  # of config.json, the second in older files
_CALLED = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def convert_folder(folder: Path, to: Path, *, dtype: str = "keep", file_bytes: int, overwrite: bool = False) -> Files:
    """Write the weights of a model's folder to another, or to a file that ends in .safetensors. Returns what each file
    holds.

    `dtype` is "keep" (what is quantised becomes bf16) or one of EXPORTED. Raises PlanError with every tensor that can't
    be read, or where something is there that may not be overwritten; DiskFullError.
    """
    keys = read_keys(folder / CONFIG)
    files = stored_files(folder)
    plain = plain_tensors(files)
    written = [
        WrittenTensor(
            tensor.name, tensor.shape, EXPORTED.get(dtype, tensor.dtype) if tensor.is_weight else tensor.dtype
        )
        for tensor in plain
    ]
    weights = [tensor for tensor, of in zip(written, plain, strict=True) if of.is_weight]
    beside = companions(folder) | {CONFIG: config_bytes(_plain_keys(keys, _most_of(weights)))}
    write = partial(_write, files, {tensor.name: tensor for tensor in plain})
    is_file = to.suffix == ".safetensors"
    return write_safetensors(
        to, written, write, file_bytes=file_bytes, overwrite=overwrite, beside={} if is_file else beside
    )


def _write(
    files: StoredFiles, plain: dict[str, PlainTensor], file: IO[bytes], tensors: Sequence[WrittenTensor]
) -> None:
    for tensor in tensors:
        for part in plain[tensor.name].parts():
            write_values(
                file, part.to(TORCH[tensor.dtype]).contiguous() if tensor.dtype in TORCH else part.contiguous()
            )
            files.forget()


def _most_of(weights: Sequence[WrittenTensor]) -> str:
    """The number type that most of the bytes have."""
    sums = dict[str, int]()
    for tensor in weights:
        sums[tensor.dtype] = sums.get(tensor.dtype, 0) + tensor.num_bytes
    return max(sums, key=lambda dtype: sums[dtype], default="F32")


def _plain_keys(keys: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The keys of a configuration whose weights are plain numbers of one type, also of a decoder within it."""
    found = {
        name: _plain_keys(value, dtype) if name == "text_config" and isinstance(value, dict) else value
        for name, value in keys.items()
        if name != "quantization_config"
    }
    return found | {name: _CALLED[dtype] for name in _DTYPE_KEYS if name in keys and dtype in _CALLED}
