"""The predicted time of an update: of Muon, beside the work of the owners of matrices, and of its single kernels."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.config.job import JobSpec
from shardwright.config.load import load_job, make_job
from shardwright.config.software import software_of
from shardwright.config.update_passes import gradient_pass_bytes, update_pass_bytes
from shardwright.cost import data_parallel, update_time
from shardwright.cost.calibration import shipped
from shardwright.cost.from_job import run_of
from shardwright.memory.rank_state import rank_state
from shardwright.schedule.job_program import job_program
from shardwright.sharding.matrix_exchange import ALL_TP_RANKS, MatrixExchange, orthogonal_flops
from shardwright.simulate.closed_form import step_time


def job_of(model: str, **plan: int) -> JobSpec:
    """Muon on GPUs, in a pipeline of one stage."""
    fields = {"dp": 8, "tp": 1, "pp": 1, "zero": 1} | plan
    sets = [f"plan.{field}={value}" for field, value in fields.items()]
    world = fields["dp"] * fields["tp"]
    return load_job(
        "llama3-405b-8k",
        [
            f"model.name={model}", "cluster.name=h100-node", f"cluster.nodes={-(-world // 8)}", *sets,
            "optimizer.name=muon", f"plan.sequence_parallel={str(fields['tp'] > 1).lower()}", "plan.virtual_stages=1",
            "batch.global_batch_size=256", "plan.schedule=1f1b", "plan.layout=[]", "cluster.software=shardwright",
        ],
    )  # fmt: skip


def most_flops(job: JobSpec) -> float:
    """FLOPs of all exchanges, each of its owner that has most to do."""
    total = 0.0
    for group in rank_state(job, job_program(job), 0)[0].updates:
        if isinstance(group.update, MatrixExchange):
            work: Counter[tuple[int, int]] = Counter()
            for of in group.update.matrices:
                for index in range(group.update.tp_size) if of.tp_owner == ALL_TP_RANKS else [of.tp_owner]:
                    cost = orthogonal_flops(of.matrix.full_rows, of.matrix.full_columns, 5)
                    work[of.shard, index] += cost
            total += max(work.values())
    return total


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("llama3-8b", {"dp": 8}),
        ("llama3-8b", {"dp": 64}),
        ("llama3-8b", {"dp": 8, "tp": 8, "zero": 2}),
        ("llama3-8b", {"dp": 16, "zero": 3}),
        ("mixtral-8x7b", {"dp": 32, "zero": 3, "ep": 8}),
    ],
)
def test_the_owner_with_most_to_do(model: str, plan: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a share of what a rank does without ZeRO, which is all."""
    monkeypatch.setattr(data_parallel, "elementwise_s", lambda *_: 0.0)
    monkeypatch.setattr(update_time, "all_to_all_s", lambda *_: 0.0)
    alone, job = job_of(model, zero=0), job_of(model, **plan)
    answer = float(step_time(run_of(job), shipped()).optimizer / step_time(run_of(alone), shipped()).optimizer)
    exact = most_flops(job) / most_flops(alone)
    assert answer == pytest.approx(exact, rel=0.3)
    assert answer >= 0.99 / job.plan.world


def step_seconds(software: str, number: str) -> float:
    """Seconds of the update of GPT's 1.3 billion parameters, each whole on one of 4 V100."""
    model = {"layers": 24, "hidden": 2048, "heads": 16, "vocab": 51200, "sequence": 1024}
    fields = {
        "model": model | {"ffn": 8192, "gated_mlp": False, "norm": "layernorm", "positions": "learned", "bias": True},
        "cluster": {"device": "v100-sxm-32g", "devices_per_node": 4, "nodes": 1, "software": software},
        "plan": {"dp": 4}, "batch": {"global_batch_size": 4},
        "precision": {"compute": number, "gradients": "compute"},
    }  # fmt: skip
    return float(step_time(run_of(make_job(fields)), shipped()).optimizer)


def test_an_update_of_many_kernels_takes_the_bytes_of_each() -> None:
    """Megatron-LM in fp16, by element. One kernel of Adam and a norm move 34 bytes. Beside them: a cast to float32 6,
    the loss scale 8, weights in 16 bits 4, and no clipping, which it does above its limit alone; before them zeros 2
    and an average 4, or until August 2021 copies for one reduction and back 8 and an average 4."""
    fused = step_seconds("megatron-2023", "fp16")
    assert step_seconds("megatron-2021", "fp16") / fused == pytest.approx((34 + 18 + 12) / 34)
    for name in ("megatron-2021-08", "megatron-2022"):
        assert step_seconds(name, "fp16") / fused == pytest.approx((34 + 18 + 6) / 34)


def test_gradients_in_float32_are_neither_scaled_nor_cast() -> None:
    """With products in bfloat16: weights 4, zeros 4, and an average 8."""
    passes = software_of("megatron-2022")
    assert update_pass_bytes(passes.update_passes, 4, is_scaled=False) == 4
    assert gradient_pass_bytes(passes.gradient_passes, 4) == 12
    assert gradient_pass_bytes(("pack",), 4) == gradient_pass_bytes(("zero",), 4) == 4


class Foreach(TorchDispatchMode):
    """Counts the bytes that operators over lists of tensors read and write; one argument given twice is read once."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "_foreach" in func.name():
            lists = [part for value in args if isinstance(value, (list, tuple)) for part in value]
            read = {part.data_ptr(): part for part in lists if isinstance(part, torch.Tensor)}
            written = args[0] if result is None else result
            self.moved += sum(part.nbytes for part in (*read.values(), *written))
        return result


def test_adam_by_operators_moves_what_torchs_does() -> None:
    """The second step of AdamW over two tensors of 4,096 elements; a single kernel reads and writes 28 bytes each."""
    parameters = [torch.nn.Parameter(torch.ones(4096)) for _ in range(2)]
    adam = torch.optim.AdamW(parameters, foreach=True)
    for parameter in parameters:
        parameter.grad = torch.ones(4096)
    adam.step()
    with Foreach() as counted:
        adam.step()
    per_step = 2 * 4  # of the tensors that count steps, which are on the host
    moved = (counted.moved - 2 * per_step) / (2 * 4096)
    assert moved == pytest.approx(28 + update_pass_bytes(("foreach",), 4, is_scaled=False), rel=0.01)
    assert update_pass_bytes(software_of("transformers-2024").update_passes, 4, is_scaled=False) == 52 + 8
    assert update_pass_bytes(software_of("transformers-2025").update_passes, 4, is_scaled=False) == 8
