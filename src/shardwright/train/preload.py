"""What the server that ranks are forked from loads once, so that each of them is up in milliseconds."""

import torch

import shardwright.train.trainer  # noqa: F401

# The first optimizer imports much; no rank should pay for that. One thread: an OpenMP pool does not survive a fork.
torch.set_num_threads(1)
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
