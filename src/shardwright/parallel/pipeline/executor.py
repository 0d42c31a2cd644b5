"""The pipeline executor: it reads a program and does what it says, action by action.

It knows no schedule. The order of work, sends, receives, gathers and reductions is the program's; what was performed is
recorded, so that it can be compared with what was planned and drawn beside what was simulated.

A send keeps its tensor until the other side has it, and never blocks. A receive is posted where the program says, and
waited for by the compute that needs it: that wait is the pipeline's idle time.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwright.parallel.comm.collectives import Axis, Pending, start_recv, start_send
from shardwright.parallel.comm.compute_turns import Pass
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.context.document_mask import without_marks
from shardwright.parallel.pipeline.action_times import ActionTimes, DeviceTimes, HostTimes, Performed
from shardwright.parallel.pipeline.microbatch import Microbatch
from shardwright.parallel.pipeline.stage_streams import InOrder, StageStreams, StreamPerStage
from shardwright.parallel.tensor.deferred_gradients import DeferredGradients
from shardwright.parallel.zero.sharded_stage import ShardedStage
from shardwright.parallel.zero.weight_stash import WeightStash
from shardwright.schedule.action import Action, Kind
from shardwright.schedule.lowering.overlap_pairs import sends_of_parts
from shardwright.schedule.lowering.reductions import before_reductions
from shardwright.schedule.lowering.weight_versions import weight_versions
from shardwright.schedule.schedule import Program

Key = tuple[int, int]  # (stage, microbatch)


class Stage(Protocol):
    """The interface of a stage of the model that the executor needs."""

    @property
    def deferred(self) -> DeferredGradients:
        """Where I leaves weight gradients for W."""

    def __call__(
        self,
        x: Tensor,
        targets_BS: Tensor | None = None,
        microbatch: Microbatch | None = None,
        marked_BT: Tensor | None = None,
    ) -> Tensor:
        """Hidden states, or the mean loss where there are targets."""

    def empty_hidden(self, batch: int) -> Tensor:
        """Memory for what passes between stages."""


class MicrobatchTokens(Protocol):
    """Token ids of microbatches by number, each [B, S + 1], such as a list."""

    def __getitem__(self, index: int, /) -> Tensor: ...


@dataclass
class _Run:
    """The state of one run of a program; gone when it ends."""

    program: Program
    tokens: MicrobatchTokens
    versions: dict[Key, int]
    microbatches: Sequence[Microbatch] | None
    loss_factors: Callable[[int], Sequence[float]]
    outputs: dict[Key, Tensor] = field(default_factory=dict)  # forward done, not yet sent on
    inputs: dict[Key, tuple[Tensor, Pending | None]] = field(default_factory=dict)
    gradients: dict[Key, tuple[Tensor, Pending | None]] = field(default_factory=dict)
    leaves: dict[Key, Tensor] = field(default_factory=dict)  # stage inputs whose gradient is wanted
    edges: dict[Key, GradientEdge] = field(default_factory=dict)  # where a backward begins
    input_gradients: dict[Key, Tensor] = field(default_factory=dict)
    sends: list[tuple[Tensor, Pending]] = field(default_factory=list)
    losses: dict[int, Tensor] = field(default_factory=dict)
    kept: dict[Key, Tensor] = field(default_factory=dict)  # stage inputs from which a forward will run again
    leaves_with: dict[Action, Action] = field(default_factory=dict)  # sends by the part of a pair that makes them
    left: dict[Action, tuple[Any, Any]] = field(default_factory=dict)  # those that left so, and when
    alive: set[Key] = field(default_factory=set)


class PipelineExecutor:
    """Runs programs on this rank's stages.

    A microbatch's loss is the mean over its tokens; gradients add up over microbatches and replicas.

    `row` are the actions of the run, and `losses` what it will return, as far as it has come. After it, `performed` is
    what was done and when, `peak_alive` the most (stage, microbatch) pairs whose activations were kept at once,
    `peak_inputs` the most of which only the stage's input was, and `versions_seen` the weights that each pair was
    computed with.
    """

    def __init__(
        self, stages: dict[int, Stage], held: Mapping[int, ShardedStage], mesh: Mesh,
        weight_stashes: dict[int, WeightStash] | None = None, separates_documents: bool = False,
        streams: StageStreams | None = None,
    ) -> None:  # fmt: skip
        """Takes the stages of this rank. With `separates_documents`, tokens have marks
        (parallel/context/document_mask.py). Where no `streams` are given to compute pairs on, they are made on CUDA; on
        a device without values parts of pairs then follow each other."""
        self._stages = stages
        self._separates_documents = separates_documents
        self._held = held
        self._mesh = mesh
        self._weight_stashes = weight_stashes or {}
        self._side: ThreadPoolExecutor | None = None
        self._pairs_apart = streams is None and mesh.device.type == "meta"
        self.reverses_pairs = False  # whether the backward is first, of pairs whose parts follow each other
        self._streams: StageStreams = streams or InOrder()
        self._makes_streams = streams is None and mesh.streams is not None
        self._times: ActionTimes = DeviceTimes() if mesh.device.type == "cuda" else HostTimes()
        self._began: Any = 0.0
        self.row: tuple[Action, ...] = ()
        self.losses: dict[int, Tensor] = {}
        self.peak_alive = 0
        self.peak_inputs = 0
        self.versions_seen: dict[Key, int] = {}

    @property
    def performed(self) -> list[Performed]:
        """The actions of the run, with their times. On CUDA the host waits for the device."""
        return self._times.performed()

    def run(
        self, program: Program, tokens: MicrobatchTokens, update: Callable[[Action], None] | None = None,
        microbatches: Sequence[Microbatch] | None = None,
        loss_factors: Callable[[int], Sequence[float]] = lambda _: (1.0,),
    ) -> dict[int, Tensor]:  # fmt: skip
        """Carry out this rank's list. `tokens` are the microbatches, each [B, S + 1]; `update` is called at each S.

        `microbatches` says which samples those are; without it nothing is dropped out. Gradients are those of the
        losses times the `loss_factors` of the microbatch: of its loss, and of those of further tokens.

        Returns the loss of each microbatch on the rank of the last stage, and nothing elsewhere.
        """
        stashed = program.weights != "current" and program.trains
        run = _Run(
            program, tokens, weight_versions(program) if stashed else {}, microbatches, loss_factors=loss_factors
        )
        row = self.row = program.ranks[self._mesh.pp.index]
        self.losses = run.losses
        for stage, weight_stash in self._weight_stashes.items() if stashed else ():
            weight_stash.expect([version for (s, _), version in run.versions.items() if s == stage])
        if self._mesh.device.type == "cpu":
            run.leaves_with = sends_of_parts(row)
        of_device = self._mesh.streams
        if self._makes_streams and of_device is not None and any(action.kind is Kind.OVERLAP for action in row):
            self._streams, self._makes_streams = StreamPerStage(of_device, self._stages), False
        armings = before_reductions(row)
        self._times.clear()
        self.peak_alive, self.peak_inputs, self.versions_seen = 0, 0, {}
        with torch.set_grad_enabled(program.trains):
            for index, action in enumerate(row):
                if self._mesh.watch is not None:
                    self._mesh.watch.doing(f"action {index}, {action}")
                for arming in armings.get(index, ()):
                    self._held[arming.stage].arm(arming.is_last, arming.is_split)
                start = self._began = self._times.now()
                if action in run.left:
                    start, end = run.left.pop(action)
                    self._times.add(action, start, start, end)
                    continue
                if action.kind is Kind.STEP:
                    assert update is not None, "a program that ends in a step needs an optimizer"
                    update(action)
                else:
                    self._do(action, run)
                self._times.add(action, start, self._began, self._times.now())
                self.peak_alive = max(self.peak_alive, len(run.alive))
                self.peak_inputs = max(self.peak_inputs, len(run.kept))
        for _, pending in run.sends:
            pending.wait()
        for weight_stash in self._weight_stashes.values() if stashed else ():
            weight_stash.load(weight_stash.newest)
        return run.losses

    def _do(self, action: Action, run: _Run) -> None:
        key = stage, _ = action.stage, action.microbatch
        match action.kind:
            case Kind.FORWARD | Kind.RECOMPUTE | Kind.BACKWARD | Kind.INPUT_GRAD | Kind.WEIGHT_GRAD:
                self._streams.fork([stage])
                self._compute(action, run)
                self._streams.join([stage])
            case Kind.OVERLAP:
                self._overlap(action, run)
            case Kind.SEND_FORWARD:
                self._send(run.outputs.pop(key), self._mesh.forward, action, stage + 1, run)
            case Kind.SEND_BACKWARD:
                self._send(run.input_gradients.pop(key), self._mesh.backward, action, stage - 1, run)
            case Kind.RECV_FORWARD:
                run.inputs[key] = self._receive(action, self._mesh.forward, run)
            case Kind.RECV_BACKWARD:
                run.gradients[key] = self._receive(action, self._mesh.backward, run)
            case Kind.REDUCE:
                self._held[stage].reduce()
            case Kind.GATHER:
                self._held[stage].gather()
            case Kind.RELEASE:
                self._held[stage].release()
            case _:
                raise NotImplementedError(f"the executor can't perform {action}")

    def _compute(self, action: Action, run: _Run) -> None:
        """Carry out an action that computes, on the stream of its stage."""
        key = stage, i = action.stage, action.microbatch
        with self._streams.computing(stage):
            match action.kind:
                case Kind.FORWARD:
                    self._forward(key, run)
                case Kind.RECOMPUTE:
                    self._load_weights(key, run)
                    output = self._pass(key, run.kept.pop(key), run)
                    if stage == run.program.num_stages - 1:
                        run.losses[i] = output
                case Kind.WEIGHT_GRAD:
                    self._stages[stage].deferred.compute(i)
                    run.alive.discard(key)
                case _:
                    self._backward(key, run, action.kind)

    def _forward(self, key: Key, run: _Run) -> None:
        stage, i = key
        if run.versions:
            self.versions_seen[key] = run.versions[key]
        self._load_weights(key, run)
        if stage == 0:
            x = self._ids(run.tokens[i][:, :-1])
        else:
            x, arrival = run.inputs.pop(key)
            if arrival is not None:
                arrival.wait()
                self._began = self._times.now()
        if key in run.program.recomputed:
            run.kept[key] = x
            with torch.no_grad():
                output = self._pass(key, x, run)
        else:
            output = self._pass(key, x, run)
        if stage == run.program.num_stages - 1:
            run.losses[i] = output  # a number; once its backward has run, where gradients are on
        elif run.program.placement.rank(stage + 1, i) == self._mesh.pp.index:
            self._streams.handed_on(output, stage + 1)
            run.inputs[stage + 1, i] = output, None
        else:
            run.outputs[key] = output

    def _ids(self, tokens_BS: Tensor) -> Tensor:
        return without_marks(tokens_BS) if self._separates_documents else tokens_BS

    def _load_weights(self, key: Key, run: _Run) -> None:
        if run.versions:
            self._weight_stashes[key[0]].load(run.versions[key])

    def _pass(self, key: Key, x: Tensor, run: _Run) -> Tensor:
        """The output of a stage, detached; where gradients are on, all is kept that its backward needs."""
        stage, i = key
        microbatch = None if run.microbatches is None else run.microbatches[i]
        keeps = torch.is_grad_enabled()
        if keeps and stage > 0:
            run.leaves[key] = x.requires_grad_()
        marked_BT = run.tokens[i] if self._separates_documents else None
        if stage == run.program.num_stages - 1:
            # A forward that will run again leaves the loss to that.
            has_loss = keeps or not run.program.trains
            targets_BS = self._ids(run.tokens[i][:, 1:]) if has_loss else None
            output = self._stages[stage](x, targets_BS, microbatch, marked_BT)
        else:
            output = self._stages[stage](x, None, microbatch, marked_BT)
        if keeps:
            # The edge alone is kept: the output's memory is free as soon as it is sent.
            run.edges[key] = get_gradient_edge(output)
            run.alive.add(key)
        return output.detach()

    def _backward(self, key: Key, run: _Run, kind: Kind) -> None:
        stage, i = key
        self._load_weights(key, run)
        if stage == run.program.num_stages - 1:
            first, *further = (torch.full((), of, device=self._mesh.device) for of in run.loss_factors(i))
            gradient = torch.stack((first, *further)) if further else first
        else:
            gradient, arrival = run.gradients.pop(key)
            if arrival is not None:
                arrival.wait()
                self._began = self._times.now()
        split = kind is Kind.INPUT_GRAD
        # On this thread, which knows the pass that it is in: for CUDA autograd would take a thread of its own.
        deferring = self._stages[stage].deferred.keeping(i) if split else nullcontext()
        with torch.autograd.set_multithreading_enabled(False), deferring:
            torch.autograd.backward(run.edges.pop(key), gradient)
        if not split:
            run.alive.discard(key)
        if run.versions:
            self._weight_stashes[stage].release(run.versions[key])
        if stage > 0:
            dx = run.leaves.pop(key).grad
            assert dx is not None, "the input of a stage has a gradient"
            if run.program.placement.rank(stage - 1, i) == self._mesh.pp.index:
                self._streams.handed_on(dx, stage - 1)
                run.gradients[stage - 1, i] = dx, None
            else:
                run.input_gradients[key] = dx

    def _overlap(self, pair: Action, run: _Run) -> None:
        """A forward and a backward side by side: while one waits for its communication, the other computes.

        Two threads do it, which take turns (parallel/comm/compute_turns.py): they compute on a CPU, and on CUDA issue
        what the stream of each pass computes. Each pass has a communicator of its own. On a CPU what the one makes is
        sent while the other still computes: Gloo tells messages apart by their tags, so it may leave before receives
        that stand before it in the program.
        """
        first, second = pair.parts
        stages = [first.stage, second.stage]
        if self._pairs_apart:
            self._streams.fork(stages)
            for part in reversed(pair.parts) if self.reverses_pairs else pair.parts:
                with self._mesh.turns.apart(_pass_of(part)):
                    self._compute(part, run)
            self._streams.join(stages)
            return
        if self._side is None:
            threads = torch.get_num_threads()
            self._side = ThreadPoolExecutor(1, "overlap", torch.set_num_threads, (threads,))
        if (key := (first.stage, first.microbatch)) not in run.program.recomputed:
            run.alive.add(key)  # from its begin: both are alive at once
        self.peak_alive = max(self.peak_alive, len(run.alive))
        # Who begins is the same on every rank: the forward, unless experts are elsewhere. A block ends with their rows
        # on the way back, so its backward begins with rows on their way, and the forward computes under that.
        begins, follows = (second, first) if self._mesh.ep.size > 1 else (first, second)
        self._streams.fork(stages)
        with self._mesh.turns.side_by_side(_pass_of(begins)):
            with self._mesh.turns.taking(_pass_of(begins)):
                beside = self._side.submit(self._do_beside, follows, run)
                self._do_part(begins, run)
            with self._mesh.ledger.lanes(-1):
                beside.result()
        self._streams.join(stages)

    def _do_beside(self, action: Action, run: _Run) -> None:
        # A thread begins with its own grad mode.
        with self._mesh.ledger.lanes(+1), self._mesh.turns.taking(_pass_of(action)), torch.enable_grad():
            self._do_part(action, run)

    def _do_part(self, part: Action, run: _Run) -> None:
        self._compute(part, run)
        if (send := run.leaves_with.get(part)) is not None:
            start = self._times.now()
            self._do(send, run)
            run.left[send] = start, self._times.now()

    def _send(self, tensor: Tensor, axis: Axis, action: Action, to_stage: int, run: _Run) -> None:
        run.sends = [(kept, pending) for kept, pending in run.sends if not pending.is_over()]
        tensor = tensor.contiguous()
        pending = start_send(tensor, axis, action.peer, self._tag(action, to_stage, run))
        run.sends.append((tensor, pending))

    def _receive(self, action: Action, axis: Axis, run: _Run) -> tuple[Tensor, Pending]:
        batch = run.tokens[action.microbatch].shape[0]
        buffer = self._stages[action.stage].empty_hidden(batch)
        return buffer, start_recv(buffer, axis, action.peer, self._tag(action, action.stage, run))

    @staticmethod
    def _tag(action: Action, to_stage: int, run: _Run) -> int:
        """Names a message: two stages may talk both ways over one pair of ranks."""
        is_backward = action.kind in (Kind.SEND_BACKWARD, Kind.RECV_BACKWARD)
        return (to_stage * run.program.num_microbatches + action.microbatch) * 2 + is_backward


def _pass_of(part: Action) -> Pass:
    return "forward" if part.kind is Kind.FORWARD else "backward"
