"""The study of one program: its timeline and figures, from which every picture, page, trace and table is made."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from shardwright.config.base import PlanError
from shardwright.config.phrase import both, say
from shardwright.config.recompute_facts import RECOMPUTES
from shardwright.config.schedule_facts import SCHEDULES
from shardwright.config.units import counted_phrase
from shardwright.schedule.pipeline_shape import PipelineShape
from shardwright.schedule.program_check import coverage_faults
from shardwright.schedule.schedule import Program, Schedule
from shardwright.schedule.shape_program import shape_order, shape_program
from shardwright.schedule.timing import Costs, Times, play
from shardwright.simulate.bubbles import STEADY_STEPS, Bubbles, Work, measure_and_play
from shardwright.simulate.slow_rank import SlowRank
from shardwright.simulate.timeline import Timeline, make_timeline


@dataclass(frozen=True)
class Formula:
    """The bubble of one step in closed form, its value if it holds, and else the conditions of that."""

    text: str
    value: float | None
    when: str

    @property
    def words(self) -> str:
        """The formula, its value and its conditions in words."""
        text = self.text if self.value is None else f"{self.text} = {number(self.value)}"
        return say("{formula}, where {condition}", formula=text, condition=self.when) if self.when else text


@dataclass(frozen=True)
class StepBubble:
    """The predicted bubble of a job's step (simulate/full_step.py), and its share of the step."""

    value: float
    share: float


@dataclass(frozen=True)
class Study:
    """A simulated program, its timeline, and its figures. A job has a `bubble`, and more idle time than that, since its
    stages differ and its messages take time. `unit` of its times is "s"; else they are told in forwards of a stage."""

    name: str
    program: Program
    times: Times
    bubbles: Bubbles
    formula: Formula | None = None
    bubble: StepBubble | None = None
    unit: str = ""

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated timeline, with the causes of its waits."""
        return make_timeline(self.program, self.times)

    @property
    def num_steps(self) -> int:
        """The number of steps of the timeline."""
        return self.times.num_steps(self.program)

    @property
    def heading(self) -> str:
        """The name and the shape."""
        return say("{name}: {shape}", name=self.name, shape=self.shape)

    @property
    def shape(self) -> str:
        """Numbers of ranks, microbatches, stages and steps, as text."""
        return shape_text(self.program, self.num_steps)


def shape_text(program: Program, num_steps: int) -> str:
    """Numbers of ranks, microbatches, stages and steps."""
    words = [counted_phrase(program.num_ranks, "rank"), counted_phrase(program.num_microbatches, "microbatch")]
    if program.num_stages != program.num_ranks:
        words.append(counted_phrase(program.num_stages, "stage"))
    return say("{listed}", listed=tuple([*words, counted_phrase(num_steps, "step")] if num_steps > 1 else words))


def study_schedule(
    name: str,
    shape: PipelineShape,
    work: Work,
    recompute: str = "none",
    gathers: bool = False,
    slow: SlowRank | None = None,
) -> Study:
    """A study of a named schedule with equal stages, of which those on a `slow` rank take longer; its timeline has the
    steps of the shape. ValueError if the schedule does not admit the shape, or if its order is wrong."""
    num_ranks, num_microbatches, num_steps = shape.num_ranks, shape.num_microbatches, shape.num_steps
    priced_shape = replace(shape, costs=work.by_stage(num_ranks * shape.virtual_stages, num_ranks))

    def program(steps: int) -> Program:
        return shape_program(name, replace(priced_shape, num_steps=steps), recompute, gathers)

    def order(steps: int) -> Schedule:
        return shape_order(name, replace(priced_shape, num_steps=steps), recompute, gathers)

    step_program = program(1)
    if faults := coverage_faults(step_program):  # of an order that somebody added
        raise PlanError(say("schedule {schedule}", schedule=name), faults)
    has_formula = not (RECOMPUTES[recompute].by_stage or gathers or slow)
    formula = _formula(name, step_program, num_microbatches, work) if has_formula else None
    costs = work.costs(step_program)
    if slow is not None:
        costs = slow.slowed(costs, step_program)
    return study(name, step_program, costs, num_steps, Streams(program, order), formula)


def drawn_steps(name: str, num_steps: int) -> int:
    """The number of steps to simulate for a drawing of `num_steps`: an asynchronous schedule needs enough to fill the
    pipeline."""
    return max(num_steps, STEADY_STEPS + 1) if not SCHEDULES[name].drains else num_steps


@dataclass(frozen=True)
class Streams:
    """Functions from a number of steps to a program, and to an order without messages. An asynchronous schedule has no
    flush between its steps."""

    program: Callable[[int], Program]
    order: Callable[[int], Schedule]


def study(
    name: str,
    step_program: Program,
    costs: Costs,
    num_steps: int = 1,
    streams: Streams | None = None,
    formula: Formula | None = None,
) -> Study:
    """A study of a program of one step at any costs. `streams` make more steps, which asynchronous schedules need."""
    order = None if streams is None else streams.order
    if step_program.weights == "current" or streams is None or num_steps == 1:
        bubbles, times = measure_and_play(step_program, costs, num_steps, order)
        return Study(name, step_program, times, bubbles, formula=formula)
    bubbles, _ = measure_and_play(step_program, costs, 1, order)
    drawn = streams.program(num_steps)
    return Study(name, drawn, play(drawn, costs), bubbles, formula=formula)


def _formula(name: str, program: Program, num_microbatches: int, work: Work) -> Formula | None:
    facts = SCHEDULES[name]
    if not facts.bubble:
        return None
    names = {
        "p": program.num_ranks,
        "m": num_microbatches,
        "v": program.num_stages // program.num_ranks,
        "F": work.forward,
        "I": work.input_grad,
        "W": work.weight_grad,
        "B": work.input_grad + work.weight_grad,
        "FB": work.pair * (work.forward + work.input_grad + work.weight_grad),
    }

    def value(expression: str) -> float:
        return float(eval(expression, {"__builtins__": {}}, names))  # the registry's own text

    holds = work.latency == 0 and (not facts.when or bool(value(facts.when)))
    conditions = [facts.when.replace("==", "=")] if facts.when and not holds else []
    conditions += [say("messages take no time")] if work.latency else []
    when = both(conditions) if conditions else ""
    return Formula(readable(facts.bubble), value(facts.bubble) if holds else None, when)


def readable(expression: str) -> str:
    """An expression of the registry as a book would print it: (p - 1)(F + B), not (p - 1) * (F + B)."""
    text = re.sub(r"\) \* \(", ")(", expression)
    text = re.sub(r"(\d) \* (?=\w)", r"\1", text)
    return re.sub(r"\) \* (?=\w)", ")", re.sub(r"(\w) \* (?=\()", r"\1", text)).replace(" * ", " ")


def number(value: float) -> str:
    """Four significant digits, from a thousand on one decimal: "4.5", "12,000", "3,004.5". Rounding errors of zero are
    zero."""
    if abs(value) >= 1000:
        return f"{value:,.1f}".removesuffix(".0")
    return f"{0.0 if abs(value) < 1e-9 else value:.4g}"
