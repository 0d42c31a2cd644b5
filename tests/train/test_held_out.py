"""The loss on held-out text: the mean over tokens that have one, each sample once, whatever the batch and the plan."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.config.job import JobSpec
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.tensor.initial_values import initial_box
from shardwright.sharding.stage_parameters import model_parameters
from shardwright.sharding.token_marks import UNCOUNTED
from shardwright.train.build import build
from shardwright.train.data.once_each import InTurn, OnceEach, unigram_loss
from shardwright.train.held_out import held_out_loss, part_note
from support.cases import marked, skewed_tokens, small_job
from support.plain_decoder import PlainDecoder
from support.ranks import run_on_mesh


class Rows:
    """Samples that are given as they are."""

    def __init__(self, rows: np.ndarray) -> None:
        self.sequence, self.rows = rows.shape[1] - 1, rows

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, first: int, count: int) -> np.ndarray:
        assert 0 <= first <= first + count <= len(self.rows), "a sample that there is not, or one a second time"
        return self.rows[first : first + count]


def numbered(length: int, name: int = 0) -> Rows:
    return Rows(np.stack([np.full(length, name), np.arange(length)], axis=1))


@given(st.integers(1, 60), st.integers(1, 80), st.integers(1, 7), st.integers(1, 4), st.integers(1, 3))
def test_each_sample_has_the_weight_of_one(held: int, most: int, size: int, per_replica: int, dp: int) -> None:
    once = OnceEach(numbered(held), most, size, size * per_replica * dp)
    rows = once.batch(0, len(once))[:, 1].reshape(-1, size)
    assert len(once) == once.num_batches * size * per_replica * dp and len(rows) == len(once.weights)
    weights = np.zeros(held)
    np.add.at(weights, rows, once.weights[:, None])
    expected = (np.arange(held) < most).astype(float)
    np.testing.assert_allclose(weights, expected, rtol=1e-12)
    for row, weight in zip(rows, once.weights, strict=True):
        assert weight in (0, 1) or len(set(row.tolist())) == 1  # the mean of copies is that of the one
    assert once.num_batches == 0 or once.weights[-size * per_replica * dp :].any()


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=4), st.data())
def test_several_sources_come_in_turn_each_sample_once(sources: list[tuple[int, int]], data: st.DataObject) -> None:
    lengths, weights = zip(*sources, strict=True)
    total = sum(lengths)
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=4)))
    reader = InTurn([numbered(length, n) for n, length in enumerate(lengths)], weights)
    parts = [reader.batch(a, b - a) for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
    whole = InTurn([numbered(length, n) for n, length in enumerate(lengths)], weights).batch(0, total)
    assert np.array_equal(np.concatenate(parts), whole)
    for n, length in enumerate(lengths):
        assert whole[whole[:, 0] == n, 1].tolist() == list(range(length))
    # As long as no source is through, each has had its share, to a sample.
    fair = min(int(length * sum(weights) / weight) for length, weight in sources) // 2
    for n, weight in enumerate(weights):
        had = np.cumsum(whole[:fair, 0] == n)
        assert (np.abs(had - np.arange(1, fair + 1) * weight / sum(weights)) <= len(weights)).all()


def few_targets(job: JobSpec, num_samples: int) -> torch.Tensor:
    """Samples with very different numbers of targets: the first have all, those in the middle few, one has none."""
    tokens, begins = skewed_tokens(job.model_copy(update={"batch": job.batch.model_copy(
        update={"global_batch_size": num_samples})}), 3)  # fmt: skip
    if not job.data.separate_documents:
        return tokens
    begins[:2] = False
    begins[2:4] = torch.arange(begins.shape[1]) % 4 > 0
    begins[4] = True
    return marked(tokens, begins)


PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("llama", {"microbatch_size": 4}),
    "mtp": ("llama-mtp", {"microbatch_size": 2}),
    "experts": ("mixtral", {"microbatch_size": 2}),
    "dp2": ("llama", {"dp": 2, "microbatch_size": 4, "zero": 3}),
    "cp2-pp2": ("gpt-tied", {"cp": 2, "pp": 2, "schedule": "dualpipev", "microbatch_size": 2}),
    "tp2-dualpipe": ("llama", {"tp": 2, "pp": 2, "schedule": "dualpipe", "sequence_parallel": True}),
}


def plain_loss(job: JobSpec, tokens: torch.Tensor) -> float:
    """In float64, all samples in one microbatch after the other, by an implementation of its own."""
    places, cpu = model_parameters(job.model), torch.device("cpu")
    weights = {place.name: initial_box(place, job.run.seed, cpu).double() for place in places}
    one = job.as_one_rank()
    one = one.model_copy(update={"plan": one.plan.model_copy(update={"microbatch_size": 1})})
    return PlainDecoder(one, weights).evaluate(tokens)


def evaluated(mesh: Mesh, job: JobSpec, tokens: torch.Tensor) -> list[float | None]:
    replica = build(job, mesh)
    return [held_out_loss(replica, Rows(rows.numpy())) for rows in (tokens, tokens[4:5])]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "separate"), [("one", False), ("mtp", False), ("dp2", False), *((name, True) for name in PLANS)]
)
def test_the_loss_is_the_mean_over_tokens(name: str, separate: bool) -> None:
    """Of eleven samples, in global batches of eight: some are full of targets, one has none."""
    kind, plan = PLANS[name]
    job = small_job(kind, batch=8, **plan)
    job = job.model_copy(update={"data": job.data.model_copy(update={"separate_documents": separate})})
    tokens = few_targets(job, 11)
    expected = plain_loss(job, tokens)
    for whole, without_targets in run_on_mesh(job, evaluated, job, tokens):
        assert whole == pytest.approx(expected, rel=1e-6)
        assert (without_targets is None) == separate


def test_a_part_is_told() -> None:
    job = small_job(batch=8)
    assert part_note(job, numbered(32)) == ""
    assert "the first 32 of 33 held-out sequences" in part_note(job, numbered(33))
    assert "run.eval_batches = 5 takes all" in part_note(job, numbered(33))


def test_the_unigram_model_is_asked_for_the_same_targets() -> None:
    shares = np.array([0.5, 0.25, 0.125, 0.125])
    rows = np.array([[0, 1, -1 - 2, 2 + UNCOUNTED, 3], [0, 0, 0, 0, 0]])
    expected = -(np.log(shares[1]) + np.log(shares[3])) / 2
    assert unigram_loss(shares, Rows(rows), 1, marks=True) == pytest.approx(expected)
    assert unigram_loss(shares, Rows(rows), 9, marks=True) == pytest.approx((2 * expected - 4 * np.log(0.5)) / 6)
    assert unigram_loss(shares, Rows(rows[1:]), 9, marks=False) == pytest.approx(-np.log(0.5))
    assert unigram_loss(shares, Rows(rows[:1, 2:4]), 9, marks=True) is None
