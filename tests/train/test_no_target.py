"""A step of which no token has a loss: no loss of 0, no update, no part in what the run watches; whatever the plan."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.config.job import JobSpec
from shardwright.config.load import make_job
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.parameter import placed_parameters
from shardwright.schedule.job_program import job_program
from shardwright.sharding.token_marks import UNCOUNTED
from shardwright.train.async_step import train_stream
from shardwright.train.build import Replica, build
from shardwright.train.checkpoint.saved_state import SavedState
from shardwright.train.checkpoint.state_part import optimizer_steps
from shardwright.train.metrics import MetricsLog
from shardwright.train.run_lines import RunResult
from shardwright.train.train_step import StepResult, learning_rate, train_step
from shardwright.train.trainer import train
from support.cases import made_up_tokens, my_tokens, small_job
from support.ranks import run_on_mesh

STEPS, EMPTY = 4, 1
State = dict[str, Tensor]


def documents(kind: str = "llama", sections: dict[str, Any] | None = None, **plan: Any) -> JobSpec:
    """A job whose documents are separate."""
    fields = small_job(kind, **plan).model_dump(mode="json", exclude_unset=True)
    given = {"data": {"separate_documents": True}, "optimizer": {"steps": STEPS, "warmup_steps": 3}}
    for section, values in [*given.items(), *(sections or {}).items()]:
        fields[section] = fields.get(section, {}) | values
    return make_job(fields)


def without_targets(tokens: Tensor) -> Tensor:
    """The same tokens, of which none counts."""
    return torch.where(tokens < 0, tokens, tokens | UNCOUNTED)


def state_of(replica: Replica, mesh: Mesh) -> State:
    return {f"{box.name} {box.box}": box.values.clone() for box in SavedState(replica, mesh).held()}


def trained(mesh: Mesh, job: JobSpec, is_empty: bool) -> tuple[list[StepResult], State, int]:
    """Some steps, one of them without a target; or all but that one."""
    replica, results = build(job, mesh), list[StepResult]()
    for step in range(STEPS):
        tokens = my_tokens(mesh, job, step)
        if step == EMPTY:
            if not is_empty:
                continue
            tokens = without_targets(tokens)
        left_out = sum(result.skipped for result in results) + (not is_empty and step > EMPTY)
        results.append(train_step(replica, step, tokens, left_out=left_out))
    return results, state_of(replica, mesh), optimizer_steps(replica)


PLANS: dict[str, JobSpec] = {
    "one rank": documents(),
    "experts, further tokens": documents("deepseek"),
    "fp16": documents(sections={"precision": {"compute": "fp16"}}),
    "dp 2, zero 3": documents(dp=2, zero=3),
    "pp 2": documents("llama-tied", pp=2),
    "top-k": documents(dp=2, compress="topk", compress_share=0.1, compress_least=1),
}


@pytest.mark.sampled(3)
@pytest.mark.processes
@pytest.mark.parametrize("name", PLANS)
def test_it_is_as_if_it_had_not_been(name: str) -> None:
    """Weights and moments are those of a run without it, bit for bit, and so are the other steps' losses and rates."""
    job = PLANS[name]
    for (results, state, num_updates), (others, other, _) in zip(
        run_on_mesh(job, trained, job, True), run_on_mesh(job, trained, job, False), strict=True
    ):
        empty = results[EMPTY]
        assert (empty.loss, empty.grad_norm, empty.skipped, empty.decision.cause) == (None, None, True, "no target")
        assert [result for result in results if result is not empty] == others
        assert num_updates == STEPS - 1
        assert state.keys() == other.keys() and all(torch.equal(state[key], other[key]) for key in state)


def streamed(mesh: Mesh, job: JobSpec, empty: int) -> tuple[list[StepResult], State]:
    """A stream of batches, one of them without a target."""
    replica = build(job, mesh)

    def batch_of(step: int) -> Tensor:
        tokens = my_tokens(mesh, job, step)
        return without_targets(tokens) if step == empty else tokens

    results = train_stream(replica, job_program(job, STEPS), first_step=0, batch_of=batch_of)
    return results, state_of(replica, mesh)


@pytest.mark.processes
@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_a_pipeline_that_never_drains_does_not_update_with_it(schedule: str) -> None:
    """With the last batch nobody computes any more: so the weights are those of a stream that ends before it."""
    job = documents(pp=2, schedule=schedule, sections={"optimizer": {"steps": STEPS, "clip_grad_norm": 0.0}})
    for results, _ in run_on_mesh(job, streamed, job, EMPTY):
        rates = [learning_rate(job.optimizer, step, left_out=step > EMPTY) for step in range(STEPS)]
        assert [result.loss is None for result in results] == [step == EMPTY for step in range(STEPS)]
        assert [result.learning_rate for result in results] == rates
    ends = run_on_mesh(job, shorter, job)
    for (_, state), other in zip(run_on_mesh(job, streamed, job, STEPS - 1), ends, strict=True):
        assert all(torch.equal(state[key], other[key]) for key in other if key.startswith(("weights.", "exp_avg")))


def shorter(mesh: Mesh, job: JobSpec) -> State:
    """The state after all steps but the last."""
    replica = build(job, mesh)
    train_stream(replica, job_program(job, STEPS - 1), 0, batch_of=lambda step: my_tokens(mesh, job, step))
    return state_of(replica, mesh)


def partly(mesh: Mesh, job: JobSpec) -> tuple[StepResult, dict[str, Tensor]]:
    """A step in which the first half of the batch has no target."""
    replica = build(job, mesh)
    tokens = made_up_tokens(job, 0)
    half = len(tokens) // 2
    tokens = torch.cat([without_targets(tokens[:half]), tokens[half:]])
    share = job.batch.global_batch_size // job.plan.dp
    result = train_step(replica, 0, tokens[mesh.dp.index * share :][:share])
    with replica.gathered():
        held = [of for stage in replica.stages.values() for of in placed_parameters(stage).values()]
        return result, {of.place.name: of.detach().clone() for of in held}


@pytest.mark.processes
@pytest.mark.parametrize("plan", [{"dp": 2}, {"microbatch_size": 1}, {"dp": 2, "microbatch_size": 2}])
def test_a_replica_or_a_microbatch_without_one(plan: dict[str, Any]) -> None:
    """The loss and the weights are those of the whole batch at once."""
    one = documents(microbatch_size=8)
    (expected, weights), *_ = run_on_mesh(one, partly, one)
    job = documents(**plan)
    for result, other in run_on_mesh(job, partly, job):
        assert result.loss == pytest.approx(expected.loss, rel=1e-6)
        for name, values in other.items():
            # One update of AdamW is at most the rate; where a gradient is next to 0 its sign is rounding.
            assert torch.allclose(values, weights[name], atol=1e-5, rtol=1e-5)


@pytest.fixture
def chats(tmp_path: Path) -> JobSpec:
    """Chats of one sample each, every other with a prompt that leaves no room for its answer."""
    lines = [{"prompt": ("p" * 80 if i % 2 else "q" * 20), "completion": "abcabcab"} for i in range(16)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    fields = small_job(batch=1).model_dump(mode="json", exclude_unset=True)
    data = {"path": str(tmp_path / "chats.jsonl"), "chats": True, "separate_documents": True, "tokenizer": "bytes"}
    fields |= {"data": data | {"validation_share": 0.0}, "run": {"sample_tokens": 0, "log_every": 4}}
    fields |= {"optimizer": {"steps": 12}, "health": {"slow_share": 0, "spike": "skip", "repeat_every": 2}}
    fields |= {"checkpoint": {"every_steps": 4}}
    fields["model"] |= {"vocab": 256, "sequence": 48}
    return make_job(fields)


def train_here(mesh: Mesh, job: JobSpec, folder: Path) -> RunResult:
    return train(job, mesh, folder)


def test_a_run_tells_of_them(chats: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = list[str]()
    monkeypatch.setattr(MetricsLog, "tell", lambda log, text: answer.append(text))
    (result,) = run_on_mesh(chats, train_here, chats, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    empty = [line for line in steps if line["loss"] is None]
    assert 0 < len(empty) < len(steps) == 12
    assert all(line["skipped_because"] == "no target" and line["skipped"] for line in empty)
    losses = [line["loss"] for line in steps if line["loss"] is not None]
    assert min(losses) > 1.0 and (result.first_loss, result.last_loss) == (losses[0], losses[-1])
    assert not any(line["skipped_because"] == "spike" for line in steps)
    assert any(f"{len(empty)} steps left out for no token of them has a loss" in line for line in answer)
    assert sum("no loss" in line for line in answer) == sum(steps[i]["loss"] is None for i in (3, 7, 11))
