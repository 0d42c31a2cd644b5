"""Lower bounds on what a plan takes, from prices of plans that are cheaper: what they exclude need not be priced.

A bound is admissible if no plan that it stands for is cheaper. Three relaxations give one:

- The slowest rank of a pipeline takes at least as long as the mean one, and the mean one a pp-th of all layers. So
  `mean_rank_token_s` prices the stage as if it were alone, without messages, replicas' communication or update; and
  `with_bubble` adds the least bubble of a schedule.
- Most schedules keep at least as many microbatches as 1F1B. So `activation_bytes` of 1F1B, with nothing sharded and
  less all that sharding could save, is the least that they take.
- Sharding and offloading move state and add communication, and change nothing else. So `unsharded_token_s` of a plan
  with nothing sharded is the least of the same plan however it is sharded.

Time is by token, for plans may have different batches. tests/test_planner.py compares with what is priced.
"""

from dataclasses import replace

import numpy as np

from shardwright.cost.calibration import Constants
from shardwright.cost.memory import Memory, peak_memory
from shardwright.planner.block import SHARING, Block, Column, Columns, Words
from shardwright.simulate.step import StepTime, step_time
from shardwright.spec.job import JobSpec

# Schedules that hide tokens' way to experts behind another microbatch.
_PAIRED = ("dualpipe", "dualpipev")
# A step is at least m + (p - 1) / v times what the mean rank takes for a microbatch.
_DRAINED = ("1f1b", "gpipe", "sequential", "interleaved-1f1b", "looped-bfs")
# No rank keeps fewer microbatches than under 1F1B.
_KEEPS_MORE = ("1f1b", "gpipe", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-h2", "dualpipe", "dualpipev")


def plain(rows: Columns) -> Columns:
    """Rows of degrees as plans with one stage a rank and nothing sharded."""
    zeros = np.zeros_like(rows["dp"])
    return rows | dict.fromkeys(SHARING, zeros) | {"virtual_stages": zeros + 1}


def mean_rank_token_s(job: JobSpec, rows: Columns, words: Words, constants: Constants) -> tuple[Column, Column]:
    """Seconds by token that the mean pipeline rank computes and communicates in a step, under any schedule.

    The second is for schedules that hide tokens' way to experts.
    """
    alone = Block(replace(words, schedule="1f1b"), plain(rows) | {"pp": np.ones_like(rows["pp"])})
    time = step_time(alone.run(job), constants)
    tokens = rows["global_batch_size"] * job.model.sequence * rows["pp"]
    paired = (time.compute + time.again + time.tensor + time.context) / tokens
    return paired + time.expert / tokens, paired


def is_paired(schedule: str) -> bool:
    """Whether the second bound of `mean_rank_token_s` holds for a schedule."""
    return schedule in _PAIRED


def with_bubble(mean_token_s: Column, columns: Columns, schedule: str, virtual: Column | int) -> Column:
    """Least seconds by token with the schedule's bubble, where each rank has at most `virtual` stages."""
    if schedule not in _DRAINED:
        return mean_token_s
    num_microbatches = columns["global_batch_size"] // (columns["dp"] * columns["microbatch_size"])
    return mean_token_s * (1.0 + (columns["pp"] - 1) / (virtual * num_microbatches))


def activation_bytes(job: JobSpec, rows: Columns, words: Words, constants: Constants) -> Column:
    """Least bytes of a process under a schedule that keeps as much as 1F1B, however state is sharded.

    Where layers do not divide evenly, other stages a rank may leave it one layer less.
    """
    pp, layers = rows["pp"], job.model.layers
    memory = peak_memory(Block(replace(words, schedule="1f1b"), plain(rows)).run(job), constants)
    return unsharded_bytes(memory) * (layers // pp) / -(-layers // pp)


def unsharded_bytes(memory: Memory) -> Column:
    """Least bytes of a process, however its state is sharded, from the memory of the plan with nothing sharded."""
    return np.asarray(memory.process - memory.parameters - memory.gradients - memory.optimizer)


def keeps_as_much(job: JobSpec, schedule: str) -> bool:
    """Whether `activation_bytes` holds for a schedule: layers must also be alike."""
    return schedule in _KEEPS_MORE and not job.model.moe.experts


def unsharded_token_s(job: JobSpec, block: Block, time: StepTime) -> Column:
    """Least seconds by token of the plans of an unsharded block, however they are sharded, from its own times."""
    parts = time.compute + time.again + time.tensor + time.context + time.expert + time.messages + time.bubble
    return np.asarray(parts / (block.columns["global_batch_size"] * job.model.sequence))
