"""Convert a folder of weights to another number type, or to safetensors files of another size, as a stream.

Quantised weights become plain ones, and pickled files become safetensors. Names, layouts and the keys of config.json
stay, but for the number type. The conversion needs memory for a part of a tensor.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from shardwright.config.hugging_face.config_json import CONFIG, read_keys
from shardwright.config.hugging_face.written_config import config_bytes
from shardwright.train.checkpoint.export import EXPORTED, TORCH, write_values
from shardwright.train.checkpoint.released_companions import companions
from shardwright.train.checkpoint.safetensors_folder import Files, write_safetensors
from shardwright.train.checkpoint.safetensors_format import WrittenTensor
from shardwright.train.checkpoint.stored_weights import PlainTensor, StoredFiles, plain_tensors, stored_files

_DTYPE_KEYS = ("dtype", "torch_dtype")  # keys of config.json, the second in older files
_CONFIG_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def convert_folder(
    folder: Path, target: Path, *, dtype: str = "keep", file_bytes: int, overwrite: bool = False
) -> Files:
    """Write the weights of a model's folder to another folder, or to a file if `target` ends in .safetensors. Returns
    the tensors of each file.

    `dtype` is "keep" (quantised tensors become bf16) or one of EXPORTED. Raises PlanError with every tensor that can't
    be read, or if a file exists that may not be overwritten; DiskFullError.
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
    weights = [tensor for tensor, source in zip(written, plain, strict=True) if source.is_weight]
    companion_files = companions(folder) | {CONFIG: config_bytes(_plain_keys(keys, _most_frequent_dtype(weights)))}
    write = partial(_write, files, {tensor.name: tensor for tensor in plain})
    is_file = target.suffix == ".safetensors"
    other_files = {} if is_file else companion_files
    return write_safetensors(
        target, written, write, file_bytes=file_bytes, overwrite=overwrite, other_files=other_files
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


def _most_frequent_dtype(weights: Sequence[WrittenTensor]) -> str:
    """The number type with the most bytes."""
    dtype_bytes = dict[str, int]()
    for tensor in weights:
        dtype_bytes[tensor.dtype] = dtype_bytes.get(tensor.dtype, 0) + tensor.num_bytes
    return max(dtype_bytes, key=lambda dtype: dtype_bytes[dtype], default="F32")


def _plain_keys(keys: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The keys of a config.json, and of the decoder's configuration within it, for plain weights of one number type."""
    plain_keys = {
        name: _plain_keys(value, dtype) if name == "text_config" and isinstance(value, dict) else value
        for name, value in keys.items()
        if name != "quantization_config"
    }
    return plain_keys | {
        name: _CONFIG_DTYPES[dtype] for name in _DTYPE_KEYS if name in keys and dtype in _CONFIG_DTYPES
    }
