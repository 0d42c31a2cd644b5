"""A rank that runs out of memory says what it held and asked for, and which change of the plan would have fitted."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwright.memory.first_fit import USABLE, first_fit
from shardwright.memory.job_memory import job_memory
from shardwright.sharding.memory_account import RankMemory
from shardwright.train.launch.out_of_memory import OutOfMemoryError, asked_bytes, is_out_of_memory, telling_what_is_held
from support.cases import small_job
from support.forked_commands import SHARDWRIGHT, run_forked

HELD = RankMemory(3 * 2**20, 2**20, 0, 0, 0)


def failing(size: int) -> Exception:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(size, dtype=torch.uint8)
    return caught.value


def test_what_torch_and_numpy_say_is_understood() -> None:
    error = failing(2**50)
    assert is_out_of_memory(error)
    assert asked_bytes(error) == 2**50
    with pytest.raises(MemoryError) as caught:
        np.empty(2**50, dtype=np.uint8)
    assert is_out_of_memory(caught.value)
    assert asked_bytes(caught.value) == 2**50
    on_cuda = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of")
    assert is_out_of_memory(on_cuda)
    assert asked_bytes(on_cuda) == 20 * 2**20
    assert not is_out_of_memory(RuntimeError("Connection closed by peer"))
    assert asked_bytes(RuntimeError("Connection closed by peer")) is None


def test_the_account_travels_with_the_error() -> None:
    message = "asked for 1,048,576.0 GiB; besides activations it held 4.0 MiB"
    with pytest.raises(OutOfMemoryError, match=message), telling_what_is_held(lambda: HELD):
        torch.empty(2**50, dtype=torch.uint8)
    with pytest.raises(ZeroDivisionError), telling_what_is_held(lambda: HELD):
        raise ZeroDivisionError


def needed(**plan: object) -> int:
    return max(memory.total_bytes for memory in job_memory(small_job("llama", batch=8, **plan)))


def test_the_first_change_that_fits_is_named() -> None:
    plan = {"dp": 2, "microbatch_size": 4}
    job = small_job("llama", batch=8, **plan)
    for fields in ({"zero": 1}, {"recompute": "full"}, {"microbatch_size": 2}):
        limit = int(needed(**plan | fields) / USABLE) + 1
        change = first_fit(job, limit)
        assert change is not None
        # Either this one, or one before it that needs no more.
        assert change.needed_bytes <= limit * USABLE
        assert change.needed_bytes == needed(**plan | change.fields)
    least = first_fit(job, int(needed(**plan | {"zero": 1}) / USABLE) + 1)
    assert str(least) == "plan.zero = 1"
    assert first_fit(job, 1000) is None


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits the address space")
def test_a_run_says_which_rank_and_what_would_have_fitted(tmp_path: Path) -> None:
    """Logits of 13 GB, in an address space of 10."""
    fields = [
        "plan.dp=1", "plan.tp=1", "plan.pp=2", "plan.sequence_parallel=false", "plan.microbatch_size=64",
        "batch.global_batch_size=64", "model.layers=2", "model.hidden=8", "model.heads=1", "model.kv_heads=1",
        "model.ffn=8", "model.vocab=50000", "model.sequence=1024", "run.device=cpu",
        "plan.loss_chunk_mib=20000", f'run.folder="{tmp_path}"',
    ]  # fmt: skip
    limit = 10 * 2**30
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit})); {SHARDWRIGHT}"
    done = run_forked(limited, "train", "quickstart", *(part for field in fields for part in ("--set", field)))
    assert done.returncode == 1, done.stderr
    assert "rank 1 (pp 1, dp 0, tp 0) failed: ran out of memory when it asked for 12.2 GiB" in done.stderr
    assert "besides activations it held" in done.stderr
    assert "Traceback" not in done.stderr
    named = re.search(r"plan.microbatch_size = (\d+)\b.* would have fitted", done.stderr)
    assert named, done.stderr
    assert int(named[1]) < 64
