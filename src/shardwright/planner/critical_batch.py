"""The critical batch: the steps that a larger batch saves, the tokens that it costs, and the learning rate for it.

To reach the same loss, batches of B tokens take S = S_min (1 + B_crit / B) steps and E = E_min (1 + B / B_crit) tokens:
at the critical batch twice the minimum of both (McCandlish et al. 2018, arXiv 1812.06162, section 2.3; Kaplan et al.
2020, arXiv 2001.08361, equations 5.1 to 5.4). It is unknown before the run. Two published fits give a range. Today's
models are outside of both (85e6 to 1.2e9 parameters, and at most 1.5e9), and the fits differ by several times: no
number here is more precise.
"""

import math
from dataclasses import dataclass

from shardwright.config.job import JobSpec
from shardwright.config.model_shape import shape_of
from shardwright.sharding.stage_parameters import num_active_parameters

# Kaplan et al. 2020: equation 1.4, in tokens; equation 1.6 with the values of table 3, in nats a
# token, parameters without embeddings, and steps at a large batch.
_BATCH, _BATCH_POWER = 2e8, 0.21
_PARAMETERS, _PARAMETERS_POWER = 6.5e13, 0.077
_STEPS, _STEPS_POWER = 2.1e3, 0.76

# Zhang et al. 2024 (arXiv 2410.21676): B = 22.91 D^0.47, in sequences of 512 tokens by millions of tokens, as agrees
# with their law by millions of parameters at 20 tokens for each, 93.20 N^0.47. It is the batch at which steps are 20 %
# more than in proportion; by the law above that is a fifth of the critical one.
_OF_DATA, _OF_DATA_POWER, _OF_DATA_SEQUENCE = 22.91, 0.47, 512
_OVERHEAD = 0.2


@dataclass(frozen=True)
class CriticalBatch:
    """Estimates of the critical batch, in tokens: by the loss at the end of the run, and by the tokens of the run."""

    by_loss_tokens: float
    by_data_tokens: float

    @property
    def span(self) -> tuple[float, float]:
        """Both estimates, the smaller one first."""
        low, high = sorted((self.by_loss_tokens, self.by_data_tokens))
        return low, high


def critical_batch(num_parameters: float, total_tokens: float, batch_tokens: float) -> CriticalBatch:
    """The critical batch of a model trained on `total_tokens` in batches of `batch_tokens`. `num_parameters` excludes
    embeddings, and counts only the experts that compute a token."""
    loss = reached_loss(num_parameters, total_tokens, batch_tokens)
    return CriticalBatch(loss_critical_tokens(loss), data_critical_tokens(total_tokens))


def loss_critical_tokens(loss: float) -> float:
    """The critical batch at a loss in nats a token, in tokens (Kaplan et al. 2020, equation 1.4)."""
    return float(_BATCH / loss ** (1 / _BATCH_POWER))


def data_critical_tokens(total_tokens: float) -> float:
    """The critical batch of a run over `total_tokens`, in tokens (Zhang et al. 2024)."""
    at_overhead = _OF_DATA * (total_tokens / 1e6) ** _OF_DATA_POWER * _OF_DATA_SEQUENCE
    return float(at_overhead / _OVERHEAD)


def reached_loss(num_parameters: float, total_tokens: float, batch_tokens: float) -> float:
    """The loss in nats a token after `total_tokens` in batches of `batch_tokens` (Kaplan et al. 2020, equations 1.6 and
    5.4).

    The loss determines the equivalent number of steps at a large batch, and that number the loss: solved by bisection.
    """
    steps = total_tokens / batch_tokens
    least_loss = (_PARAMETERS / num_parameters) ** _PARAMETERS_POWER

    def loss_after(loss: float) -> float:
        effective_steps = steps / (1 + loss_critical_tokens(loss) / batch_tokens)
        return least_loss + (_STEPS / effective_steps) ** _STEPS_POWER

    low, high = least_loss, least_loss + 100.0
    while high - low > 1e-9 * low:
        middle = (low + high) / 2
        low, high = (middle, high) if loss_after(middle) > middle else (low, middle)
    return (low + high) / 2


def rebatched_tokens(total_tokens: float, batch_tokens: float, other_tokens: float, critical_tokens: float) -> float:
    """Tokens in batches of `other_tokens` that reach the loss of `total_tokens` in batches of `batch_tokens`."""
    return total_tokens * (1 + other_tokens / critical_tokens) / (1 + batch_tokens / critical_tokens)


@dataclass(frozen=True)
class Rescaled:
    """Optimizer settings for a batch `times` as large.

    They are AdamW's by the square-root rule, which keeps the noise of the run: Malladi et al. 2022 (arXiv 2205.10287,
    section 5). A beta is None if `times` (1 - beta) would be 1 or more. `sgd_learning_rate` is SGD's by the linear rule
    (Goyal et al. 2017, arXiv 1706.02677). Neither rule holds far above the critical batch.
    """

    times: float
    learning_rate: float
    beta1: float | None
    beta2: float | None
    epsilon: float
    sgd_learning_rate: float


def rescaled(job: JobSpec, times: float) -> Rescaled:
    """The job's optimizer settings for a batch `times` as large."""
    optimizer = job.optimizer
    betas = [1 - times * (1 - beta) for beta in (optimizer.beta1, optimizer.beta2)]
    beta1, beta2 = (beta if beta > 0 else None for beta in betas)
    root = math.sqrt(times)
    rate = optimizer.learning_rate
    return Rescaled(times, rate * root, beta1, beta2, epsilon=optimizer.epsilon / root, sgd_learning_rate=rate * times)


@dataclass(frozen=True)
class BatchLimits:
    """A job's batch and the critical batch. `steps` and `total_tokens` are those of the job's run."""

    batch_tokens: int
    steps: int
    total_tokens: int
    critical: CriticalBatch

    @property
    def more_tokens(self) -> tuple[float, float]:
        """Share of tokens beyond those of the smallest batches, for the same loss, by the larger and by the smaller
        estimate of the critical batch."""
        low, high = self.critical.span
        return self.batch_tokens / high, self.batch_tokens / low

    def rebatched_tokens(self, batch_tokens: float) -> tuple[float, float]:
        """(fewest, most) tokens in batches of `batch_tokens` for the same loss, by the two estimates."""
        total = self.total_tokens
        fewest, most = sorted(
            rebatched_tokens(total, self.batch_tokens, batch_tokens, critical) for critical in self.critical.span
        )
        return fewest, most


def batch_limits(job: JobSpec, total_tokens: int = 0) -> BatchLimits:
    """The limits of the batch of a job whose run has `total_tokens`; 0 for the tokens of its optimizer.steps."""
    batch = job.tokens_per_step
    total = total_tokens or job.tokens_of_run
    shape = shape_of(job.model)
    computing = max(1, num_active_parameters(job.model) - shape.num_tables * shape.table_elements)
    return BatchLimits(batch, max(1, round(total / batch)), total, critical_batch(computing, total, batch))
