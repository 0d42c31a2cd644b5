"""Work that a step gives a device without waiting for it: numbers alike in each step are there from the first."""

from typing import Any

import pytest
import torch

from shardwright.config.job import JobSpec
from shardwright.model.gates import expert_choice
from shardwright.model.gates.choice import Known
from shardwright.model.gates.expert_choice import ExpertChoice
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.optimizers import adafactor
from shardwright.train.build import build
from shardwright.train.train_step import train_step
from support.cases import made_up_tokens, small_job, with_optimizer
from support.ranks import run_on_mesh


class TorchWith:
    """torch, with another `tensor`."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __getattr__(self, name: str) -> object:
        return getattr(torch, name)


def copies_by_step(mesh: Mesh, job: JobSpec) -> list[int]:
    """How often each step of the optimizer makes a tensor of numbers of the host."""
    replica, copies = build(job, mesh), [0]

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        copies[-1] += 1
        return torch.tensor(*args, **kwargs)

    adafactor.torch = TorchWith(counted)  # type: ignore[assignment]
    for step in range(3):
        train_step(replica, step, made_up_tokens(job, step))
        copies.append(0)
    return copies[:-1]


@pytest.mark.parametrize("tp", [1, 2])
def test_adafactor_has_its_numbers_from_the_first_step(tp: int) -> None:
    job = with_optimizer(small_job(tp=tp), name="adafactor")
    for first, *others in run_on_mesh(job, copies_by_step, job):
        assert first > 0
        assert others == [0, 0]


def test_experts_are_in_order_before_the_host_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then it has launched all that does not need to know the most choices of a token."""
    done: list[str] = []
    order, numbers = expert_choice.by_preference, expert_choice.HostNumbers

    class Numbers(numbers):
        def read(self, dry: list[int] | None = None) -> list[int]:
            done.append("read")
            return super().read(dry)

    def ordered(values: torch.Tensor) -> torch.Tensor:
        done.append("order")
        return order(values)

    monkeypatch.setattr(expert_choice, "HostNumbers", Numbers)
    monkeypatch.setattr(expert_choice, "by_preference", ordered)
    spec = small_job("expert-choice").model.moe
    scores_TE = torch.rand(32, spec.experts, generator=torch.Generator().manual_seed(1))
    choice = ExpertChoice(spec).choose_freely(scores_TE, Known(torch.zeros(1), torch.zeros(1), None))
    assert done == ["order", "read"]
    assert choice.experts_TK.shape[1] == int(choice.holds_TK.sum(-1).max())
