"""The price of each plan of a block: seconds and bytes by the cost model, and if it fits."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.config.cluster_facts import host_room_bytes
from shardwright.config.job import JobSpec
from shardwright.config.software import software_of
from shardwright.cost.calibration import Constants, device_of
from shardwright.layers.memo import Memo
from shardwright.memory.fit_chance import SURE, most_needed_bytes
from shardwright.memory.rank_estimate import Memory, peak_memory
from shardwright.planner.search.plan_block import Column, PlanBlock
from shardwright.simulate.closed_form import StepTime, step_time_and_spare


@dataclass(frozen=True)
class BlockPrices:
    """Prices of a block, plan by plan: fields of `time` and `memory` are columns. `token_s` are seconds a token, and
    `laid_out_s` is a lower bound on them under any layout of the layers over the stages."""

    time: StepTime
    memory: Memory
    token_s: Column
    laid_out_s: Column
    fits: Column


def room_bytes(job: JobSpec) -> float:
    """Bytes that a device of the cluster offers to processes."""
    return device_of(job.cluster.device).offered_bytes


def sure_room_bytes(job: JobSpec) -> float:
    """Bytes that a process may be predicted to need so that its plan surely fits.

    The memory of this runtime is counted, not predicted, so all that a device offers is sure.
    """
    room = room_bytes(job)
    return room if software_of(job.cluster.software).is_own else most_needed_bytes(room, SURE)


def plan_room_bytes(job: JobSpec, memory: Memory) -> float:
    """The room for plans that are compared with a job's own, which needs `memory`: they surely fit if it does."""
    sure = sure_room_bytes(job)
    return sure if fits(job, memory, sure) else room_bytes(job)


def fits(job: JobSpec, memory: Memory, room: float) -> Any:
    """True if a process fits in `room` bytes of the device, and its offloaded state in the host's memory."""
    return (memory.process <= room) & (memory.host <= host_room_bytes(job.cluster))


def prices(job: JobSpec, block: PlanBlock, constants: Constants, memo: Memo | None = None) -> BlockPrices:
    """Price a block. `memo` keeps earlier results of this job with these constants.

    KeyError names what is unknown.
    """
    memo = memo or Memo()
    run = block.run(job, memo)
    (time, spare_s), memory = step_time_and_spare(run, constants, memo), peak_memory(run, constants, memo)
    tokens = block.columns["global_batch_size"] * job.model.sequence
    fitting = np.broadcast_to(fits(job, memory, room_bytes(job)), tokens.shape)
    token_s = np.broadcast_to(time.total / tokens, tokens.shape)
    laid_out_s = np.broadcast_to((time.total - spare_s) / tokens, tokens.shape)
    return BlockPrices(time, memory, token_s, laid_out_s, fits=fitting)


def laid_out_token_s(job: JobSpec, block: PlanBlock, constants: Constants, memo: Memo) -> Column:
    """The seconds a token of `BlockPrices.laid_out_s`, without the rest of the price."""
    time, spare_s = step_time_and_spare(block.run(job, memo), constants, memo)
    return np.asarray((time.total - spare_s) / (block.columns["global_batch_size"] * job.model.sequence))
