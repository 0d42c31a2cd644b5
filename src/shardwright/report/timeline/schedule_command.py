"""Output of the commands `schedule` and `simulate`: one study, or a comparison of several."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from shardwright.config import catalog, largest
from shardwright.config.base import PlanError, faults_in
from shardwright.config.phrase import ENGLISH, each, in_language, say, sentences_of
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.text_columns import filled, fitting, terminal_width
from shardwright.config.units import counted_phrase
from shardwright.report.document import AlignedRows, Lines, Part, document_text
from shardwright.report.output import write_output
from shardwright.report.timeline.job_study import JobStudy, cost_faults
from shardwright.report.timeline.page import section_of, timeline_page
from shardwright.report.timeline.picture import picture
from shardwright.report.timeline.schedule_figures import as_dict, as_full_dict, comparison
from shardwright.report.timeline.study import Study, drawn_steps, number, study_schedule
from shardwright.report.timeline.terminal import draw, palette_of
from shardwright.report.timeline.trace import trace
from shardwright.schedule.pipeline_shape import PipelineShape
from shardwright.schedule.shape_program import size_faults
from shardwright.simulate.bubbles import Work
from shardwright.simulate.slow_rank import SlowRank


@dataclass(frozen=True)
class Output:
    """The files for a result, its form in the terminal: text, or JSON if `as_json`; and its language."""

    html: Path | None = None
    svg: Path | None = None
    trace: Path | None = None
    as_json: bool = False
    no_colour: bool = False
    language: str = ENGLISH


@dataclass(frozen=True)
class Request:
    """The options of `schedule`. `virtual_stages` None means 2 for schedules that let users choose, else 1."""

    num_ranks: int
    num_microbatches: int
    virtual_stages: int | None
    num_steps: int
    forward: float
    input_grad: float
    weight_grad: float
    latency: float
    most_alive: float
    recompute: bool  # stages keep their inputs only, and run their forwards again
    gather: float | None  # None: nothing is sharded
    slow: tuple[int, float] | None  # a rank, and how many times as long as the others it computes; None: all are equal

    @property
    def slow_rank(self) -> SlowRank | None:
        """The rank that computes longer than the others; None if there is none."""
        return None if self.slow is None else SlowRank(*self.slow)

    @property
    def work(self) -> Work:
        """The costs of one microbatch."""
        return Work(self.forward, self.input_grad, self.weight_grad, self.latency, gather=self.gather or 0.0)

    def shape(self, name: str) -> PipelineShape:
        """The shape under a named schedule."""
        virtual_stages = self.virtual_stages
        if virtual_stages is None:
            virtual_stages = 2 if _chooses(name) else 1
        most_alive = self.most_alive if name == "auto" else 0.0
        return PipelineShape(
            self.num_ranks, self.num_microbatches, virtual_stages, num_steps=self.num_steps, most_alive=most_alive
        )

    def study(self, name: str) -> Study:
        """A study of a named schedule. ValueError if the schedule does not admit the shape."""
        shape = self.shape(name)
        if faults := size_faults(name, shape, drawn_steps(name, self.num_steps)):
            raise PlanError(say("schedule {schedule}", schedule=name), faults)
        recompute: str = "stage" if self.recompute else "none"
        gathers = self.gather is not None
        return study_schedule(name, shape, self.work, recompute, gathers=gathers, slow=self.slow_rank)

    def comparison_faults(self) -> list[str]:
        """The fault of a comparison that would take too long; none if the pipeline is too long for every schedule."""
        p, m, steps = self.num_ranks, self.num_microbatches, self.num_steps
        if p * m * steps <= largest.COMPARED or p > largest.PIPELINE_RANKS:
            return []
        product = say("{stages:,} stages x {microbatches:,} microbatches", stages=p, microbatches=m)
        if steps > 1:
            product = say("{product} x {steps:,} steps", product=product, steps=steps)
        return [
            say(
                "--compare plays every schedule, and {product} = {actions:,} are more than {most:,}; use at most "
                "{fewer:,} microbatches, or name one schedule without --compare",
                product=product,
                actions=p * m * steps,
                most=largest.COMPARED,
                fewer=max(1, largest.COMPARED // (p * steps)),
            )
        ]

    def faults(self) -> list[str]:
        """All faults that do not depend on the schedule."""
        counts = {
            "--stages": self.num_ranks,
            "--microbatches": self.num_microbatches,
            "--steps": self.num_steps,
            "--virtual": 1 if self.virtual_stages is None else self.virtual_stages,
        }
        costs = {
            "--forward": self.forward,
            "--input-grad": self.input_grad,
            "--weight-grad": self.weight_grad,
            "--communication": self.latency,
            "--alive": self.most_alive,
            "--gather": self.gather or 0.0,
        }
        faults: list[str] = [
            say("{option} is {count}; use 1 or more", option=option, count=count)
            for option, count in counts.items()
            if count < 1
        ]
        faults += [fault for option, cost in costs.items() for fault in cost_faults(option, cost)]
        faults += self._slow_faults()
        if not faults and self.forward + self.input_grad + self.weight_grad == 0:
            return [say("--forward, --input-grad and --weight-grad are all 0, so there is nothing to draw; use 1 each")]
        return faults

    def _slow_faults(self) -> list[str]:
        """Faults of --slow: a rank that is not there, or one that is faster than the others."""
        if self.slow is None:
            return []
        (rank, times), faults = self.slow, list[str]()
        if not 0 <= rank < self.num_ranks:
            faults.append(
                say(
                    "--slow names rank {rank}, and the ranks are 0 to {last}; name one of these",
                    rank=rank,
                    last=self.num_ranks - 1,
                )
            )
        if not 1 <= times <= largest.SLOWER:
            faults.append(
                say(
                    "--slow is {times:g} times, and it must be from 1 to {most:,}; use 1.25, say",
                    times=times,
                    most=largest.SLOWER,
                )
            )
        return faults

    @property
    def note(self) -> str:
        """A note with the costs."""
        costs = f"F {number(self.forward)}, I {number(self.input_grad)}, W {number(self.weight_grad)}"
        wire = say("messages take no time")
        if self.latency:
            wire = say("a message takes {latency}", latency=number(self.latency))
        sentences = [say("{costs} for one microbatch through all layers of a rank; {wire}.", costs=costs, wire=wire)]
        if self.recompute:
            sentences.append(say("Stages keep their inputs, and run their forwards again."))
        if self.gather is not None:
            gather = number(self.gather)
            sentences.append(
                say("Gathering all parameters of a rank takes {gather}, reducing its gradients too.", gather=gather)
            )
        if self.slow is not None:
            rank, times = self.slow
            sentences.append(say("Rank {rank} computes {times} times as long.", rank=rank, times=number(times)))
        return sentences_of(sentences)


def show_schedule(name: str | None, request: Request, compare: bool, output: Output) -> None:
    """Run the command `schedule`. PlanError with every fault."""
    subject = say("schedule {schedule}", schedule=name) if name else "schedule"
    faults = request.faults()
    if name is None and not compare:
        faults.append(say("name a schedule, or use --compare; there are: {names}", names=tuple(SCHEDULES)))
    if name is not None and name not in SCHEDULES:
        hint = catalog.did_you_mean(name, list(SCHEDULES))
        faults.append(say("{name} is not a schedule; {hint}", name=repr(name), hint=hint))
    if compare and name is None and (output.trace or output.svg):
        faults.append(say("--trace and --svg are of one schedule; name it, or use --html for all"))
    if compare and not faults:
        faults += request.comparison_faults()
    if faults:
        raise PlanError(subject, faults)
    study = None
    if name is not None:
        try:
            study = request.study(name)
        except ValueError as error:
            raise PlanError(subject, faults_in(error)) from None
    if compare:
        _show_comparison(request, study, output)
    elif study is not None:
        _show(study, request.note, output, as_full_dict(study))


def show_job(study: JobStudy, output: Output) -> None:
    """Show the result of the command `simulate`. PlanError if a file would be too large."""
    if faults := _drawing_faults(output, [study.drawn]):
        raise PlanError(say("output"), faults)
    _write(output, output.html, "--html", lambda: job_page(study, output.language))
    _write(output, output.svg, "--svg", lambda: job_picture(study, output.language))
    _write(output, output.trace, "--trace", lambda: job_trace(study))
    click.echo(json.dumps(study.values) if output.as_json else job_text(study, output))


def job_text(study: JobStudy, output: Output = Output()) -> str:
    """A job's timeline as text for the terminal."""
    simulated = study.simulated
    if study.executed is None:
        heading, note = in_language(study.title, output.language), in_language(study.note, output.language)
        return f"{heading}\n{filled(note)}\n\n{_text(simulated, output)}"
    texts = (say("{job}, {study}", job=study.job.name, study=simulated.heading), study.note, say("simulated"))
    heading, note, above, below, verdict = (
        in_language(text, output.language) for text in (*texts, say("executed"), study.verdict)
    )
    drawings = _drawing(simulated, output), _drawing(study.executed, output)
    return f"{heading}\n{note}\n\n{above}\n{drawings[0]}\n\n{below}\n{drawings[1]}\n\n{verdict}"


def job_page(study: JobStudy, language: str = ENGLISH) -> str:
    """A job's timeline as a page of HTML in a language."""
    return timeline_page(study.title, study.sections(), study.note, language=language)


def job_picture(study: JobStudy, language: str = ENGLISH) -> str:
    """A job's timeline as SVG, with words of a language."""
    return picture(study.drawn.timeline, study.drawn.name, language=language, unit=study.drawn.unit)


def job_trace(study: JobStudy) -> str:
    """A job's timeline as a trace for Perfetto."""
    return _trace_text(study.drawn, study.title)


def _show(study: Study, note: str, output: Output, as_json: dict[str, Any]) -> None:
    _write_files(study, note, output, study.heading)
    if output.as_json:
        click.echo(json.dumps(as_json))
    else:
        heading, costs = in_language(study.heading, output.language), in_language(note, output.language)
        click.echo(f"{fitting(heading)}\n{filled(costs)}\n\n{_text(study, output)}")


def _text(study: Study, output: Output) -> str:
    """A study as text for the terminal."""
    section = section_of(study)
    tables = AlignedRows(section.figures, range(3)), AlignedRows(section.table), AlignedRows(section.memory)
    return document_text([_drawing(study, output), *tables], output.language)


def _drawing(study: Study, output: Output) -> str:
    return draw(
        study.timeline, terminal_width(), palette_of(sys.stdout, output.no_colour), output.language, unit=study.unit
    )


def _show_comparison(request: Request, named_study: Study | None, output: Output) -> None:
    studies, left_out = [], list[str]()
    for name in SCHEDULES:
        try:
            studies.append((request if _chooses(name) else replace(request, virtual_stages=None)).study(name))
        except ValueError as error:
            left_out.append(say("{name} is left out: {reason}", name=name, reason=each(faults_in(error))))
    if not studies:
        raise PlanError("schedule --compare", left_out)
    ranks, microbatches = (
        counted_phrase(request.num_ranks, "rank"),
        counted_phrase(request.num_microbatches, "microbatch"),
    )
    shape = say("{listed}", listed=(ranks, microbatches))
    if named_study is not None:
        _write_files(named_study, request.note, Output(None, output.svg, output.trace), named_study.heading)
    if output.html:
        if faults := _drawing_faults(Output(output.html), studies):
            raise PlanError(say("output"), faults)
        title = say("Pipeline schedules: {shape}", shape=shape)
        page = timeline_page(title, [section_of(study) for study in studies], request.note, studies, output.language)
        _write(output, output.html, "--html", lambda: page)
    if output.as_json:
        click.echo(json.dumps({"schedules": [as_dict(study) for study in studies]}))
    else:
        parts: list[Part] = [] if named_study is None else [named_study.heading, _text(named_study, output)]
        note = fitting(in_language(request.note, output.language))
        parts += [Lines([shape, note]), AlignedRows(comparison(studies))]
        click.echo(document_text(parts, output.language))
    if left_out:
        lines = left_out if output.as_json else ["", *(in_language(line, output.language) for line in left_out)]
        click.echo("\n".join(lines), err=output.as_json)


def _chooses(name: str) -> bool:
    """True if users may choose the number of stages on a rank."""
    return SCHEDULES[name].stages_per_rank == 0


def _drawing_faults(output: Output, studies: Sequence[Study]) -> list[str]:
    """Faults of files with so many actions that nobody could open them."""
    if not (output.svg or output.html or output.trace):
        return []
    actions = [action for study in studies for row in study.program.ranks for action in row]
    num_steps = max(study.num_steps for study in studies)
    num_all = num_steps * len(actions)
    num_computed = num_steps * sum(bool(action.computes()) for action in actions)
    return [
        say(
            "{option} would draw {count:,} actions, and a file of more than {most:,} hardly opens; use fewer "
            "microbatches, stages or steps, or leave it out: the terminal and --json have no such limit",
            option=option,
            count=num_drawn,
            most=most,
        )
        for option, path, num_drawn, most in (
            ("--svg", output.svg, num_computed, largest.PICTURE),
            ("--html", output.html, num_all, largest.PAGE),
            ("--trace", output.trace, num_all, largest.PAGE),
        )
        if path is not None and num_drawn > most
    ]


def _write_files(study: Study, note: str, output: Output, title: str) -> None:
    if faults := _drawing_faults(output, [study]):
        raise PlanError(say("output"), faults)
    sections = [section_of(study)]
    _write(output, output.html, "--html", lambda: timeline_page(title, sections, note, language=output.language))
    _write(output, output.svg, "--svg", lambda: picture(study.timeline, study.name, language=output.language))
    _write(output, output.trace, "--trace", lambda: _trace_text(study, title))


def _trace_text(study: Study, title: str) -> str:
    trace_dict = (
        trace(study.timeline, title, microseconds=1e6, unit="s") if study.unit else trace(study.timeline, title)
    )
    return json.dumps(trace_dict) + "\n"


def _write(output: Output, path: Path | None, option: str, text: Callable[[], str]) -> None:
    """Write a file, if it is asked for, and name it on standard error."""
    if path is None:
        return
    write_output(path, text(), option)
    language = ENGLISH if output.as_json else output.language
    click.echo(in_language(say("wrote {file}", file=str(path)), language), err=True)
