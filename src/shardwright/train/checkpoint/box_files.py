"""Parts that writing and reading of boxes share: torch.distributed.checkpoint's words for a box and for an error.

The planners say which boxes a rank has (box_writer.py) or wants (box_reader.py), the storage how they lie in files;
torch.distributed.checkpoint finds what overlaps with what. Its own files are not used, for they are opened with pickle,
and can't be trusted in part. Each rank plans for itself: who writes what follows from the plan of the job, so that
nothing needs to be agreed on.
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

# Each rank plans for itself, and torch.distributed.checkpoint warns of that each time.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

# What a file is written and read in at a time.
SLAB_BYTES = 32 * MIB


def cause(error: dcp.CheckpointException) -> BaseException:
    """The error that was raised on this rank, without the wrapping."""
    return next((failure[0] for failure in error.failures.values()), error)


def chunk(box: Box) -> ChunkStorageMetadata:
    """A box in torch.distributed.checkpoint's words."""
    return ChunkStorageMetadata(torch.Size(start for start, _ in box), torch.Size(shape_of_box(box)))
