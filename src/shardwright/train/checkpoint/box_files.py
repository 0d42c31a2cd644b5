"""Helpers that box_writer.py and box_reader.py share: boxes and errors of torch.distributed.checkpoint.

A planner says which boxes a rank has (box_writer.py) or wants (box_reader.py), and a storage class how they lie in
files; torch.distributed.checkpoint finds the overlaps. Its own file format is not used: it is read with pickle, and a
part of a file can't be verified. Each rank plans for itself: the boxes that a rank writes follow from the plan of the
job, so that ranks need not negotiate.
"""

import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
)

from shardwright.config.units import MIB
from shardwright.sharding.parameter_shard import Box
from shardwright.sharding.row_boxes import shape_of_box

# torch.distributed.checkpoint warns each time that a rank plans for itself.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

# Bytes of a file that are written or read at a time.
SLAB_BYTES = 32 * MIB


def cause(error: dcp.CheckpointException) -> BaseException:
    """The exception that was raised on this rank, without torch's wrapper."""
    return next((failure[0] for failure in error.failures.values()), error)


def chunk(box: Box) -> ChunkStorageMetadata:
    """A box as torch.distributed.checkpoint describes it: offsets and sizes."""
    return ChunkStorageMetadata(torch.Size(start for start, _ in box), torch.Size(shape_of_box(box)))
