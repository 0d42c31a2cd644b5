"""The verdict of `verify` as text: the largest differences of a plan from one rank, and whether they are rounding."""

from collections.abc import Sequence
from typing import Protocol

from shardwright.config.job import JobSpec
from shardwright.config.phrase import say
from shardwright.config.units import counted_phrase
from shardwright.sharding.groups import loses_gradients


class NumericalVerdict(Protocol):
    """Runs that were compared (measure/verify.py)."""

    @property
    def world(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def max_loss_difference(self) -> float: ...
    @property
    def max_grad_norm_relative_difference(self) -> float: ...
    @property
    def max_parameter_relative_difference(self) -> float: ...
    @property
    def bitwise(self) -> bool: ...
    @property
    def differences(self) -> tuple[float, ...]: ...
    def within(self, tolerance: float) -> bool:
        """True if all differences are at most `tolerance`."""


def verdict_parts(
    job: JobSpec, verdict: NumericalVerdict, moved_runs: Sequence[NumericalVerdict], tolerance: float, is_rounded: bool
) -> list[str]:
    """The lines of a verdict. `moved_runs` are one rank from weights that are moved by one rounding each, beside one
    from weights that are not; `is_rounded` says that the plan differs no more than these."""
    passed = verdict.within(tolerance) or is_rounded
    lines: list[str] = [
        say(
            "{ranks} against one, {steps} of {tokens:,} tokens:",
            ranks=counted_phrase(verdict.world, "rank"),
            steps=counted_phrase(verdict.steps, "step"),
            tokens=job.tokens_per_step,
        ),
        say(
            "  loss           differs by at most {difference:.2e} nats a token", difference=verdict.max_loss_difference
        ),
        say(
            "  gradient norm  differs by at most {difference:.2e} of itself",
            difference=verdict.max_grad_norm_relative_difference,
        ),
        say(
            "  parameters     differ by at most {difference:.2e} of their norm",
            difference=verdict.max_parameter_relative_difference,
        ),
        _conclusion(verdict, tolerance, passed, is_rounded),
    ]
    if moved_runs:
        moved = max(max(run.differences) for run in moved_runs)
        lines.append(
            say(
                "  one rank from weights that are moved by one rounding each differs from one that is not by up to "
                "{moved:.2e}",
                moved=moved,
            )
        )
        if not passed and max(verdict.differences) <= moved:
            lines.append(
                say(
                    "  rounding alone makes as large a difference, so {number} can't prove this plan; prove it with "
                    "--set precision.compute=float32, or with a larger --tolerance",
                    number=job.precision.compute,
                )
            )
    if loses_gradients(job.plan) and not passed:
        lines.append(
            say(
                '  plan.compress = "{compression}" leaves out a part of each gradient, so that steps after the first '
                'one differ; set plan.compress = "none" to prove the rest of the plan',
                compression=job.plan.compress,
            )
        )
    return lines


def _conclusion(verdict: NumericalVerdict, tolerance: float, passed: bool, is_rounded: bool) -> str:
    if is_rounded:
        return say("  equal to rounding")
    if verdict.bitwise:
        return say("  equal, bit for bit")
    if passed:
        return say("  equal to a tolerance of {tolerance:g}", tolerance=tolerance)
    return say("  NOT equal to a tolerance of {tolerance:g}", tolerance=tolerance)
