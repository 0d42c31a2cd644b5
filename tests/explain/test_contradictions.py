"""Claims that are commonly told, held against jobs: arithmetic by hand, and jobs that a claim is not about."""

import pytest

from shardwright.api.loaded_job import load
from shardwright.config.catalog import names
from shardwright.config.job import JobSpec
from shardwright.config.phrase import in_language
from shardwright.explain.contradictions.claims_on_job import CLAIMS, contradictions
from shardwright.explain.contradictions.told_model import another_size
from shardwright.explain.story import tell
from shardwright.report.explain.story_dict import story_dict
from shardwright.report.explain.story_text import story_text


def job_of(name: str, *overrides: str) -> JobSpec:
    return load(name, *overrides).spec


def claims_of(name: str, *overrides: str) -> dict[str, str]:
    return {one.name: one.holds for one in contradictions(job_of(name, *overrides))}


# A claim: a job with overrides that it is about, texts of its arithmetic, overrides that take it out of the job.
CASES = {
    "another-size": ("gpt-100b-told", (), ("100 layers of 12,288", "181.2 billion", "100 billion", "74 %"),
                     ("model.hidden=9216", "model.ffn=36864")),
    "state-on-device": ("gpt-100b-32xa100", (), ("387.0 GiB", "80.0 GiB"), ("model.layers=4",)),
    "same-devices": ("gpt-100b-told", ("plan.tp=4", "plan.dp=2"), ("tp 4 x pp 4 = 16", "a node has 4"),
                     ("plan.tp=1", "plan.dp=8")),
    "transposed-groups": ("gpt-100b-told", (), ("dp 8 makes 8 groups of 4", "dp 4"), ("batch.global_batch_size=64",)),
    "trillion-degrees": ("gpt3-175b-3072", (), ("3,072", "175 billion", "96 layers"), ("model.name=megatron-1t",)),
    "half-the-devices": ("llama3-405b-16k", (), ("8 x 1 x 16 x 64 = 8,192", "128 replicas", "dp 128 makes 16,384"),
                         ("batch.global_batch_size=4096", "plan.dp=256", "cluster.name=h100-node",
                          "cluster.nodes=4096")),
    "interleaved": ("gpt-100b-told", (), ("42.9 %", "27.3 %"), ("plan.schedule=gpipe",)),
    "two-shares": ("gpt-100b-told", (), ("(4 - 1) / 4 = 75.0 %", "(4 - 1) / (4 + 4 - 1) = 42.9 %"),
                   ("plan.schedule=zb-h1",)),
    "loop-of-stages": ("gpt-100b-told", ("plan.schedule=sequential",), ("4 ranks", "75.0 %"), ("plan.schedule=1f1b",)),
    "filled-pipeline": ("gpt-100b-told", (), ("4 microbatches", "4 stages", "1f1b"), ("plan.dp=32", "plan.pp=1")),
    "no-bubble": ("gpt-100b-told", ("plan.schedule=dualpipe", "batch.global_batch_size=64"), ("4 stages", "7.7 %"),
                  ("plan.schedule=1f1b",)),
    "zero-saving": ("gpt-100b-told", ("plan.zero=1",), ("8 replicas", "65.6 %"), ("plan.zero=0",)),
    "both-directions": (
        "gpt-100b-told", ("cluster.device=a100-sxm-80g", "precision.float8=none",
                          "cluster.intra_node.bandwidth_gb_per_s=900"),
        ("says 900", "300 GB/s", "600"), ("cluster.intra_node.bandwidth_gb_per_s=300",),
    ),
    "another-nvlink": ("gpt-100b-32xa100", (), ("300 GB/s", "600"), ("cluster.device=tpu-v4",)),
    "float8-units": ("gpt-100b-told", ("cluster.device=a100-sxm-80g",), ("a100-sxm-80g", "bfloat16"),
                     ("precision.float8=none",)),
    "gather-after-attention": ("gpt3-175b-3072", (), ("all_reduce of 48 MiB",), ("plan.tp=1", "plan.dp=48")),
    "broadcast-after-reduce": ("gpt-100b-told", (), ("8 replicas",), ("plan.zero=1",)),
}  # fmt: skip


@pytest.mark.parametrize("claim", CASES)
def test_a_claim_is_checked_where_a_job_has_it(claim: str) -> None:
    name, overrides, texts, without = CASES[claim]
    holds = claims_of(name, *overrides)[claim]
    assert all(text in holds for text in texts), holds
    assert claim not in claims_of(name, *overrides, *without)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("claim", CASES)
def test_explain_says_it_in_both_languages_and_of_no_other_job(claim: str) -> None:
    name, overrides, _, without = CASES[claim]
    (told,) = (one.told for one in CLAIMS if one.name == claim)
    stories = [tell(job_of(name, *overrides, *more)) for more in ((), without)]
    for language in ("en", "zh"):
        has, lacks = ("".join(story_text(story, language).split()) for story in stories)
        line = "".join(in_language(told, language).split())
        assert line in has
        assert line not in lacks


def test_every_claim_has_a_case() -> None:
    assert {claim.name for claim in CLAIMS} == set(CASES)


def test_a_small_job_on_one_rank_has_none() -> None:
    assert not claims_of("quickstart", "plan.dp=1", "plan.tp=1", "plan.pp=1", "plan.sequence_parallel=false")


def test_explain_tells_those_of_the_job() -> None:
    story = tell(job_of("gpt-100b-told"))
    text, answer = story_text(story), story_dict(story)["contradictions"]
    assert "11. What is often told otherwise" in text
    assert [one["name"] for one in answer] == [one.name for one in contradictions(story.job)] != []
    assert all(f'"{one["told"]}"' in " ".join(text.split()) for one in answer)
    assert "181.9 billion" in " ".join(text.split())


@pytest.mark.long
def test_names_of_the_catalog_say_the_size_of_their_models() -> None:
    one_rank = ("plan.tp=1", "plan.pp=1", "plan.dp=1", "plan.sequence_parallel=false")
    jobs = {name: job_of("quickstart", f"model.name={name}", *one_rank) for name in names("models")}
    assert len(jobs) > 100 and not [name for name, job in jobs.items() if another_size(job)]
