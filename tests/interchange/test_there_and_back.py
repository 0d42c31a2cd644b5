"""Plans to each system and back: 30 that it has are the same, and one that it lacks is refused with the nearest."""

import pytest

from interchange.drawn_jobs import drawn_job, jobs_of
from shardwright.config.job import JobSpec
from shardwright.config.load import load_job
from shardwright.interchange.exported import Lacking, asked_of, exported
from shardwright.interchange.foreign_job import job_of_texts
from shardwright.interchange.meaning import differences
from shardwright.interchange.nearest import way_to, with_fields
from shardwright.interchange.system import SYSTEMS

pytestmark = pytest.mark.long

# Of what 30 plans of each there must be some, so that the equality says something.
VARIED = {
    "megatron": {"pp", "tp", "cp", "ep", "zero", "recompute", "virtual_stages", "order"},
    "nemo": {"pp", "tp", "cp", "ep", "zero", "recompute", "virtual_stages"},
    "torchtitan": {"pp", "tp", "cp", "ep", "zero", "recompute", "schedule", "zero_ranks", "sequence_parallel"},
    "torchtitan-0.2": {"pp", "tp", "cp", "ep", "zero", "recompute", "schedule", "zero_ranks", "cp_method"},
    "deepspeed": {"pp", "tp", "cp", "zero", "offload_optimizer", "recompute"},
    "accelerate": {"pp", "tp", "cp", "zero", "recompute", "zero_ranks"},
    "primus": {"pp", "tp", "cp", "ep", "zero", "recompute", "virtual_stages", "order"},
    "axolotl": {"tp", "zero", "offload_optimizer", "recompute"},
    "llamafactory": {"tp", "zero", "offload_optimizer", "recompute"},
    "nanotron": {"pp", "tp", "cp", "zero", "recompute", "schedule", "sequence_parallel"},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", list(SYSTEMS))
def test_thirty_plans_are_the_same_afterwards(name: str) -> None:
    system, varied = SYSTEMS[name], dict[str, set[str]]()
    for job in jobs_of(system, seed=5, count=30):
        files = exported(system, job).files
        back = job_of_texts(system, files, asked_of(job), "back").job
        assert differences(job, back) == []
        for field in VARIED[name]:
            varied.setdefault(field, set()).add(str(getattr(job.plan, field)))
    assert {field for field, values in varied.items() if len(values) < 2} == set()


def nearest_of(name: str, job: JobSpec) -> JobSpec | None:
    """The plan that a system has in place of one that it lacks."""
    try:
        exported(SYSTEMS[name], job)
    except Lacking as error:
        return error.nearest
    return None


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", list(SYSTEMS))
def test_what_a_system_lacks_is_refused_with_the_nearest_plan_that_it_has(name: str) -> None:
    system, refused = SYSTEMS[name], 0
    for number in range(16):
        job = drawn_job(9, number, "llama3-8b")
        if job is None:
            continue
        near = nearest_of(name, job)
        if near is not None:
            refused += 1
            exported(system, near)
            pasted = with_fields(job, way_to(job, near))
            assert pasted is not None
            exported(system, pasted)
    assert refused >= 2


def test_a_lack_is_told_by_its_field() -> None:
    job = load_job("deepseek-v3")
    with pytest.raises(Lacking) as caught:
        exported(SYSTEMS["megatron"], job)
    assert "plan.schedule = dualpipe can't be said to Megatron-LM; the nearest is 1f1b" in caught.value.faults
    near = caught.value.nearest
    assert near is not None and near.plan.schedule == "1f1b" and near.model == job.model


def test_what_is_left_out_is_told() -> None:
    job = load_job("gpt3-175b-1024", ["health.slow_share=0.5", "checkpoint.every_steps=100", "plan.bucket_mib=50.0"])
    assert exported(SYSTEMS["megatron"], job).left_out == (
        "checkpoint.every_steps",
        "health.slow_share",
        "plan.bucket_mib",
    )


@pytest.mark.parametrize(("name", "zero"), [("megatron", 0), ("nemo", 1), ("torchtitan", 2), ("torchtitan-0.2", 2)])
def test_uneven_stages_are_written(name: str, zero: int) -> None:
    sets = ["plan.schedule=1f1b", "plan.virtual_stages=1", "plan.pp=4", "plan.tp=8", "plan.dp=2", f"plan.zero={zero}"]
    sets += ["plan.layout=[31, 33, 33, 29]", "cluster.devices_per_node=8", "cluster.nodes=8", "precision.float8=none"]
    sets += ["batch.global_batch_size=64", "cluster.name=mine"]
    job = load_job("llama3-405b-8k", sets)
    back = job_of_texts(SYSTEMS[name], exported(SYSTEMS[name], job).files, asked_of(job), "back").job
    assert back.plan.layout == [31, 33, 33, 29]


@pytest.mark.parametrize("name", ["megatron", "nemo"])
def test_the_layout_of_llama3_405b_comes_back(name: str) -> None:
    """128 stages of 16 ranks for 126 layers: the embedding and the loss are stages of their own."""
    job = load_job("llama3-405b-8k", ["plan.zero=1"])
    back = job_of_texts(SYSTEMS[name], exported(SYSTEMS[name], job).files, asked_of(job), "back").job
    assert (back.plan.pp, back.plan.virtual_stages, back.model.layers) == (16, 8, 126)
    assert back.plan.layout == [0, *[1] * 126, 0]


@pytest.mark.parametrize("changes", [{"cp_method": "ulysses"}, {"virtual_stages": 3}, {"extra_warmup": 0}])
def test_a_field_that_nothing_reads_is_no_difference(changes: dict[str, object]) -> None:
    job = JobSpec()
    assert differences(job, job.model_copy(update={"plan": job.plan.model_copy(update=changes)})) == []


@pytest.mark.parametrize("field", ["tp", "microbatch_size", "offload_optimizer"])
def test_a_field_that_counts_is_a_difference(field: str) -> None:
    job = JobSpec()
    other = job.model_copy(
        update={"plan": job.plan.model_copy(update={field: 2 if field != "offload_optimizer" else 0.5})}
    )
    assert [name for name, _, _ in differences(job, other)] == [f"plan.{field}"]


RAMP = ["batch.ramp.start=16", "batch.ramp.increment=16", "batch.ramp.samples=64"]
LLAMA = ["model.name=llama3-8b", "plan.tp=2", "plan.dp=4", "plan.pp=1"]


def test_a_batch_that_grows_goes_to_nemo_with_the_steps_of_the_run() -> None:
    job = load_job("quickstart", RAMP)
    back = job_of_texts(SYSTEMS["nemo"], exported(SYSTEMS["nemo"], job).files, asked_of(job), "back").job
    assert differences(job, back) == [] and back.batch.grows and back.optimizer.steps == job.optimizer.steps


@pytest.mark.parametrize("name", ["deepspeed", "accelerate"])
def test_the_way_out_has_every_field_that_can_not_be_said_and_no_other(name: str) -> None:
    job = load_job("quickstart", [*LLAMA, *RAMP, "plan.zero=2"])
    near = nearest_of(name, job)
    assert near is not None
    ramp = dict.fromkeys(("batch.ramp.start", "batch.ramp.increment", "batch.ramp.samples"), 0)
    assert way_to(job, near) == {"plan.sequence_parallel": False} | ramp


def test_sequence_parallel_goes_before_what_is_sharded() -> None:
    job = load_job("quickstart", [*LLAMA, "plan.zero=3", "plan.sequence_parallel=true"])
    near = nearest_of("accelerate", job)
    assert near is not None and way_to(job, near) == {"plan.sequence_parallel": False}


def test_a_field_of_the_model_is_in_the_way_out() -> None:
    job = load_job("bloom-176b-384")
    near = nearest_of("nemo", job)
    assert near is not None
    assert {"model.positions", "model.embedding_norm"} <= way_to(job, near).keys()


@pytest.mark.parametrize("name", ["deepspeed", "accelerate"])
def test_a_model_without_a_family_is_refused_in_words_of_this_command(name: str) -> None:
    job = load_job("quickstart", ["model.qk_norm=l2"])
    with pytest.raises(Lacking) as caught:
        exported(SYSTEMS[name], job)
    assert "--names" not in str(caught.value) and "--to megatron" in str(caught.value)


@pytest.mark.parametrize(("rate", "lowest"), [("0.00015", "1.5e-05"), ("3e-4", "3e-05"), ("6.5e-5", "6.5e-06")])
def test_the_lowest_learning_rate_is_written_as_people_write_it(rate: str, lowest: str) -> None:
    job = load_job("quickstart", (f"optimizer.learning_rate={rate}", "optimizer.min_learning_rate_ratio=0.1"))
    assert f"    --min-lr {lowest}\n" in exported(SYSTEMS["megatron"], job).files["run.sh"]
    nanotron = "\n".join(exported(SYSTEMS["nanotron"], job).files.values())
    assert float(nanotron.partition("min_decay_lr: ")[2].split()[0]) == float(lowest)
