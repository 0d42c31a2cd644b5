"""Sizes of the blocks in which a step computes tensors that would be too large as a whole: logits, and gradients that a
CPU sums in another dtype than it computes them in.

Logits of all tokens would be the largest tensor of a step: 4 bytes for each token and each row of the vocabulary. A
chunk of tokens has only its own logits, and frees them before the next chunk begins (model/loss.py). Each chunk reads
the matrix twice, and reads and writes its gradient: 12 bytes per element of the matrix, next to 6 FLOPs per element and
token. An H100 computes 270 FLOPs in the time of a byte: these bytes are 42 % of the products' time with 1,300 tokens,
10 % with 5,200 and 7 % with 8,192; a CPU needs tens of tokens. A chunk is some positions of the sequence, of all
samples of a microbatch. All ranks of a tp line take the same positions, because they sum over the vocabulary for each
of them.

On CUDA one kernel multiplies 16-bit numbers and adds the product to a float32 sum of a weight's gradient. A CPU has no
such kernel: the product is a tensor of its own, which is added to the sum block by block of rows, so that it is small
and still in the cache (parallel/tensor/parameter.py).
"""

from functools import lru_cache
from typing import Any

from shardwright.config.array_math import least, most
from shardwright.config.catalog_entry import read_entry
from shardwright.config.cluster import DeviceSpec
from shardwright.config.job import JobSpec
from shardwright.config.units import FLOAT32_BYTES, GIB, MIB

# Chunks of the loss.

_ON_CPU_BYTES = 32 * MIB  # if no device is named, ranks are processes on a CPU
# The largest share of a GPU's memory: 2.5 GiB of 80, for 5,200 tokens of a vocabulary of 128,256 that is not cut. More
# tokens than are enough gain nothing.
_SHARE_OF_DEVICE = 1 / 32
_ENOUGH_TOKENS = 8192
_UNKNOWN_GIB = 40  # memory of a GPU that the job does not name


def loss_chunk_bytes(job: JobSpec) -> Any:
    """Most bytes of the float32 logits of a chunk, on one rank."""
    if job.plan.loss_chunk_mib:
        return round(job.plan.loss_chunk_mib * MIB)
    if job.runs_on_cpu:
        return _ON_CPU_BYTES
    devices = [part.device for part in job.cluster.parts] or [job.cluster.device]
    enough_bytes = _ENOUGH_TOKENS * _token_bytes(job)
    return least(enough_bytes, round(_SHARE_OF_DEVICE * min(map(_memory_bytes, devices))))


def _token_bytes(job: JobSpec) -> Any:
    """Bytes of the float32 logits of a token, on one rank."""
    return FLOAT32_BYTES * -(-job.model.vocab // job.plan.tp)


def loss_positions(job: JobSpec) -> Any:
    """Positions of a chunk, among the positions that a rank has between layers; the last chunk may have fewer. An array
    if the plan has arrays."""
    plan = job.plan
    tokens = plan.microbatch_size * (plan.tp if plan.sequence_parallel else 1)
    positions = loss_chunk_bytes(job) // (_token_bytes(job) * tokens)
    positions = positions + (1 - positions) * (positions < 1)  # one position at least
    num_chunks = -(-job.tokens_between // positions)
    return -(-job.tokens_between // num_chunks)


def num_loss_chunks(job: JobSpec) -> Any:
    """Chunks of a microbatch."""
    return -(-job.tokens_between // loss_positions(job))


@lru_cache(maxsize=64)
def _memory_bytes(device: str) -> float:
    if device == "unknown":
        return _UNKNOWN_GIB * GIB
    return read_entry("devices", device, DeviceSpec).memory_gib * GIB


_ALIGNED, _EVEN = 8, 64  # elements: 16 bytes of numbers of 16 bits, and columns that kernels take at once


def logit_columns(rows: Any, is_cuda: bool) -> Any:
    """Columns of logits of so many `rows` of the vocabulary. On CUDA products whose sizes are no multiple of 16 bytes
    take slow kernels: with the 50,257 rows of GPT-2 an H200 reaches 95 to 145 TFLOP/s, with 50,304 rows 610 to 810. So
    logits have more columns there, and the matrix is copied into memory with as many rows (model/loss.py)."""
    even = -(-rows // _EVEN) * _EVEN
    return rows + (even - rows) * (rows % _ALIGNED > 0) * is_cuda


# Gradients of weights.

_BLOCK_BYTES = 4 * MIB
_LEAST_ROWS = 64  # fewer make the product slower


def rows_at_once(num_columns: Any, element_bytes: int) -> Any:
    """Rows of a block of a gradient with `num_columns` columns; an array if that is one."""
    return most(_LEAST_ROWS, _BLOCK_BYTES // (element_bytes * num_columns))
