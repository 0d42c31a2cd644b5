"""The critical batch: published values, the trade of steps for tokens, and settings for another batch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.config.load import load_job
from shardwright.planner.critical_batch import (
    batch_limits,
    critical_batch,
    data_critical_tokens,
    loss_critical_tokens,
    reached_loss,
    rebatched_tokens,
    rescaled,
)

TOKENS = st.floats(1e4, 1e9)


@given(TOKENS, TOKENS, TOKENS)
def test_steps_and_tokens_lie_on_the_hyperbola(batch: float, other: float, critical: float) -> None:
    """(S / S_min - 1) (E / E_min - 1) = 1: McCandlish et al. 2018."""
    fewest_tokens = rebatched_tokens(1e12, batch, 0.0, critical)
    tokens = rebatched_tokens(1e12, batch, other, critical)
    fewest_steps = fewest_tokens / critical
    assert (tokens / other / fewest_steps - 1) * (tokens / fewest_tokens - 1) == pytest.approx(1, rel=1e-3)
    assert rebatched_tokens(tokens, other, batch, critical) == pytest.approx(1e12)


def test_at_the_critical_batch_tokens_are_twice_the_fewest() -> None:
    assert rebatched_tokens(1e12, 5e6, 0.0, 5e6) == pytest.approx(0.5e12)


@pytest.mark.parametrize(("loss", "tokens"), [(4.0, 2.7e5), (3.0, 1.07e6), (2.0, 7.4e6)])
def test_the_critical_batch_at_a_loss_is_that_of_kaplan(loss: float, tokens: float) -> None:
    assert loss_critical_tokens(loss) == pytest.approx(tokens, rel=0.02)


@pytest.mark.parametrize("millions", [85, 151, 302, 604, 1200])
def test_the_critical_batch_of_data_agrees_with_the_law_of_its_authors_for_models(millions: int) -> None:
    """93.20 N^0.47 at 20 tokens a parameter, in sequences of 512 tokens, at an overhead of 20 %."""
    of_model = 93.20 * millions**0.47 * 512
    assert 0.2 * data_critical_tokens(20e6 * millions) == pytest.approx(of_model, rel=0.01)


def test_the_loss_is_what_its_own_steps_reach() -> None:
    """Table 3 of Kaplan et al. 2020, at large batches: steps as they are; at small ones fewer count."""
    at_large = reached_loss(1e9, 1e5 * 1e12, 1e12)
    assert at_large == pytest.approx((6.5e13 / 1e9) ** 0.077 + (2.1e3 / 1e5) ** 0.76, rel=1e-4)
    assert reached_loss(1e9, 1e5 * 1e5, 1e5) > at_large
    assert critical_batch(1e9, 1e10, 1e5).span[0] <= critical_batch(1e9, 1e12, 1e5).span[0]


def test_published_batches_lie_below_or_near_the_range_and_the_range_is_wide() -> None:
    """GPT-3's 3.2 million tokens and Llama 3's 16 million were chosen below what costs many tokens."""
    for name, most in (("gpt3-175b-1024", 0.3), ("llama3-405b-16k", 0.7)):
        limits = batch_limits(load_job(name, []))
        lowest, highest = limits.critical.span
        assert lowest < highest
        fewest, largest = limits.more_tokens
        assert 0 < fewest < largest < most
        assert limits.total_tokens == limits.steps * limits.batch_tokens
        low, high = limits.rebatched_tokens(limits.batch_tokens)
        assert low == high == pytest.approx(limits.total_tokens)
        assert limits.rebatched_tokens(4 * limits.batch_tokens)[0] > limits.total_tokens


def test_optimizer_settings_of_a_larger_batch() -> None:
    job = load_job("gpt3-175b-1024", [])
    by_four = rescaled(job, 4.0)
    assert by_four.learning_rate == pytest.approx(2 * job.optimizer.learning_rate)
    assert by_four.sgd_learning_rate == pytest.approx(4 * job.optimizer.learning_rate)
    assert (by_four.beta1, by_four.beta2) == pytest.approx((0.6, 0.8))
    assert by_four.epsilon == pytest.approx(job.optimizer.epsilon / 2)
    assert rescaled(job, 11.0).beta1 is None
    back = rescaled(job.model_copy(update={"optimizer": job.optimizer.model_copy(update={
        "learning_rate": by_four.learning_rate, "beta1": by_four.beta1})}), 0.25)  # fmt: skip
    assert (back.learning_rate, back.beta1) == pytest.approx((job.optimizer.learning_rate, job.optimizer.beta1))
