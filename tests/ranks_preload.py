"""What the fork server loads once, so that a rank of a test is up in milliseconds."""

import pytest  # noqa: F401
import torch
from click.testing import CliRunner  # noqa: F401

import cases  # noqa: F401
import shardwright.cli
import shardwright.train.stream
import shardwright.train.trainer  # noqa: F401

# The first optimizer imports much; no rank should pay for that. One thread: an OpenMP pool does not survive a fork.
torch.set_num_threads(1)
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
