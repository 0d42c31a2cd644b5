"""Claims about pipelines: names of schedules, and their bubbles with passes of equal length and free messages."""

from shardwright.config.job import JobSpec
from shardwright.config.phrase import Phrase, say
from shardwright.explain.contradictions.told_claim import ToldClaim


def is_interleaved(job: JobSpec) -> Phrase | None:
    """Plain 1F1B, headed "interleaved"."""
    p, m = job.plan.pp, job.num_microbatches
    if job.plan.schedule != "1f1b" or p == 1:
        return None
    return say(
        "1f1b has one stage on a rank, and a bubble of {plain:.1f} % of a step, as gpipe has; interleaved-1f1b with "
        "two has {interleaved:.1f} %, and more messages",
        plain=100 * (p - 1) / (m + p - 1),
        interleaved=100 * (p - 1) / (2 * m + p - 1),
    )


def two_shares(job: JobSpec) -> Phrase | None:
    """The bubble as a share of computing beside that of the step."""
    p, m = job.plan.pp, job.num_microbatches
    if job.plan.schedule not in ("1f1b", "gpipe") or p == 1:
        return None
    return say(
        "({p} - 1) / {m} = {of_computing:.1f} % is the bubble over computing, ({p} - 1) / ({m} + {p} - 1) = "
        "{of_step:.1f} % over the step: one bubble, two shares",
        p=p,
        m=m,
        of_computing=100 * (p - 1) / m,
        of_step=100 * (p - 1) / (m + p - 1),
    )


def loop_of_stages(job: JobSpec) -> Phrase | None:
    """A loop over the stages, which runs one of them at a time."""
    p = job.plan.pp
    if job.plan.schedule != "sequential" or p == 1:
        return None
    return say(
        "one stage computes at a time: {p} ranks are as fast as one, and each waits {share:.1f} % of a step",
        p=p,
        share=100 * (p - 1) / p,
    )


def filled_pipeline(job: JobSpec) -> Phrase | None:
    """Microbatches that fill a pipeline from one end, told as DualPipe."""
    p, m = job.plan.pp, job.num_microbatches
    if job.plan.schedule not in ("1f1b", "gpipe") or min(p, m) == 1:
        return None
    return say(
        "{m} microbatches fill {p} stages from one end under {schedule}, as under every schedule; dualpipe sends them "
        "in from both ends at once, for which each rank holds two stages, so twice the weights",
        m=m,
        p=p,
        schedule=job.plan.schedule,
    )


def no_bubble(job: JobSpec) -> Phrase | None:
    """DualPipe, told to have no bubble."""
    p, m = job.plan.pp, job.num_microbatches
    if job.plan.schedule != "dualpipe" or p == 1:
        return None
    return say(
        "dualpipe feeds {p} stages from both ends, and still waits {share:.1f} % of a step where F, I and W take as "
        "long (Liu et al. 2024, arXiv 2412.19437, table 2); each rank holds two stages, so twice the weights",
        p=p,
        share=100 * (p - 2) / (3 * m + p - 2),
    )


CLAIMS = (
    ToldClaim("interleaved", say("1F1B is also called interleaved"), is_interleaved),
    ToldClaim("two-shares", say("the bubble is (p - 1) / m, and elsewhere (p - 1) / (m + p - 1)"), two_shares),
    ToldClaim("loop-of-stages", say("a loop over the stages is a pipeline"), loop_of_stages),
    ToldClaim("filled-pipeline", say("filling a pipeline with microbatches is DualPipe"), filled_pipeline),
    ToldClaim("no-bubble", say("DualPipe fills the pipeline, so it has no bubble"), no_bubble),
)
