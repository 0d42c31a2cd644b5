"""How many tokens the output product and the loss take at once: logits of all tokens never exist.

They would be the largest tensor of a step: 4 bytes for each token and each row of the vocabulary. A chunk of tokens has
only its own logits, and is through with them when the next one comes (model/loss.py). Each chunk reads the matrix twice
and reads and writes its gradient, 12 bytes an element of the matrix beside 6 FLOPs a token. On an H100, which computes
270 FLOPs in the time of a byte, that is 42 % of the products' time with 1,300 tokens, 10 % with 5,200 and 7 % with
8,192; a CPU needs tens of tokens. A chunk is some positions of the sequence, of all samples of a microbatch. All ranks
of a tp line take the same ones, for they sum over the vocabulary for each.
"""

from functools import lru_cache
from typing import Any

from shardwright.config.array_math import least
from shardwright.config.catalog_entry import read_entry
from shardwright.config.cluster import DeviceSpec
from shardwright.config.job import JobSpec
from shardwright.config.units import GIB, MIB

_FLOAT32 = 4
_ON_CPU_BYTES = 32 * MIB  # where no device is named, ranks are processes on a CPU
# Of a GPU's memory at most: 2.5 GiB of 80, 5,200 tokens of a vocabulary of 128,256 that is not cut. More tokens than
# are enough gain nothing.
_SHARE_OF_DEVICE = 1 / 32
_ENOUGH_TOKENS = 8192
_UNKNOWN_GIB = 40  # of a GPU that the job does not name


def loss_chunk_bytes(job: JobSpec) -> Any:
    """Most bytes of the float32 logits of a chunk, on one rank."""
    if job.plan.loss_chunk_mib:
        return round(job.plan.loss_chunk_mib * MIB)
    if job.runs_on_cpu:
        return _ON_CPU_BYTES
    devices = [part.device for part in job.cluster.parts] or [job.cluster.device]
    enough = _ENOUGH_TOKENS * _token_bytes(job)
    return least(enough, round(_SHARE_OF_DEVICE * min(map(_memory_bytes, devices))))


def _token_bytes(job: JobSpec) -> Any:
    """Bytes of the float32 logits of a token, on one rank."""
    return _FLOAT32 * -(-job.model.vocab // job.plan.tp)


def loss_positions(job: JobSpec) -> Any:
    """Positions of a chunk, of those that a rank has between layers; the last chunk may have fewer. An array where
    numbers of the plan are."""
    plan = job.plan
    tokens = plan.microbatch_size * (plan.tp if plan.sequence_parallel else 1)
    fitting = loss_chunk_bytes(job) // (_token_bytes(job) * tokens)
    fitting = fitting + (1 - fitting) * (fitting < 1)  # one position at least
    num_chunks = -(-job.tokens_between // fitting)
    return -(-job.tokens_between // num_chunks)


def num_loss_chunks(job: JobSpec) -> Any:
    """Chunks of a microbatch."""
    return -(-job.tokens_between // loss_positions(job))


@lru_cache(maxsize=64)
def _memory_bytes(device: str) -> float:
    if device == "unknown":
        return _UNKNOWN_GIB * GIB
    return read_entry("devices", device, DeviceSpec).memory_gib * GIB
