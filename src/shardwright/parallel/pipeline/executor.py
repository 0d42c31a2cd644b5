"""The pipeline executor: executes a program, action by action.

It knows no schedule. The program orders all work, sends, receives, gathers and reductions. Executed actions are
recorded, so that they can be compared with the plan and with the simulation.

A send keeps its tensor until the receiver has it, and never blocks. A receive is posted when the program says so, and
the compute action that needs it waits for it: that wait is the pipeline's idle time.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from shardwright.parallel.comm.collectives import Axis, Pending, start_recv, start_send
from shardwright.parallel.comm.compute_turns import Pass
from shardwright.parallel.comm.process_groups import Mesh
from shardwright.parallel.context.document_mask import without_marks
from shardwright.parallel.pipeline.action_times import ActionTimes, DeviceTimes, Performed
from shardwright.parallel.pipeline.pipeline_stage import Microbatch, MicrobatchTokens, Stage
from shardwright.parallel.pipeline.stage_streams import StageStreams, StreamPerStage
from shardwright.parallel.zero.sharded_stage import ShardedStage
from shardwright.parallel.zero.weight_stash import WeightStash
from shardwright.schedule.action import Action, Kind
from shardwright.schedule.lowering.overlap_pairs import sends_of_parts
from shardwright.schedule.lowering.reductions import before_reductions
from shardwright.schedule.lowering.weight_versions import weight_versions
from shardwright.schedule.schedule import Program

Key = tuple[int, int]  # (stage, microbatch)


@dataclass
class _Run:
    """The state of one run of a program."""

    program: Program
    tokens: MicrobatchTokens
    versions: dict[Key, int]
    microbatches: Sequence[Microbatch] | None
    loss_factors: Callable[[int], Sequence[float]]
    outputs: dict[Key, Tensor] = field(default_factory=dict)  # of forwards whose send is to come
    inputs: dict[Key, tuple[Tensor, Pending | None]] = field(default_factory=dict)
    gradients: dict[Key, tuple[Tensor, Pending | None]] = field(default_factory=dict)
    leaves: dict[Key, Tensor] = field(default_factory=dict)  # stage inputs whose gradient is wanted
    edges: dict[Key, GradientEdge] = field(default_factory=dict)  # from which backwards begin
    input_gradients: dict[Key, Tensor] = field(default_factory=dict)
    sends: list[tuple[Tensor, Pending]] = field(default_factory=list)
    losses: dict[int, Tensor] = field(default_factory=dict)
    recompute_inputs: dict[Key, Tensor] = field(default_factory=dict)  # stage inputs from which a forward runs again
    sends_by_part: dict[Action, Action] = field(default_factory=dict)  # the send of a part of a pair, issued with it
    early_sends: dict[Action, tuple[Any, Any]] = field(default_factory=dict)  # such sends that were issued, and when
    alive: set[Key] = field(default_factory=set)  # whose activations are kept


class PipelineExecutor:
    """Runs programs on this rank's stages.

    A microbatch's loss is the mean over its tokens; gradients add up over microbatches and replicas.

    `row` are the actions of the run, and `losses` the losses so far. After the run, `performed` are the executed
    actions and their times; `peak_alive` is the largest number of (stage, microbatch) pairs whose activations were kept
    at once, `peak_inputs` the largest number of which only the stage's input was kept, and `versions_seen` the version
    of the weights with which each pair was computed.
    """

    def __init__(
        self,
        stages: dict[int, Stage],
        sharded_stages: Mapping[int, ShardedStage],
        mesh: Mesh,
        weight_stashes: dict[int, WeightStash] | None = None,
        separates_documents: bool = False,
        streams: StageStreams | None = None,
    ) -> None:
        """Takes the stages of this rank. With `separates_documents`, tokens have marks
        (parallel/context/document_mask.py). Pairs are computed on `streams`; if these are not given, they are made on
        CUDA, and on a device without values the parts of a pair run one after the other."""
        self._stages = stages
        self._separates_documents = separates_documents
        self._sharded_stages = sharded_stages
        self._mesh = mesh
        self._weight_stashes = weight_stashes or {}
        self._second_thread: ThreadPoolExecutor | None = None
        self._runs_pairs_in_sequence = streams is None and mesh.device.type == "meta"
        self.reverses_pairs = False  # if parts of pairs run one after the other, the backward is first
        self._streams = streams or StageStreams()
        self._makes_streams = streams is None and mesh.streams is not None
        self._times = ActionTimes() if mesh.streams is None or mesh.device.type != "cuda" else DeviceTimes(mesh.streams)
        self._began: Any = 0.0
        self.row: tuple[Action, ...] = ()
        self.losses: dict[int, Tensor] = {}
        self.peak_alive = 0
        self.peak_inputs = 0
        self.versions_seen: dict[Key, int] = {}

    @property
    def performed(self) -> list[Performed]:
        """The executed actions of the run, with their times. On CUDA the host waits for the device."""
        return self._times.performed()

    def run(
        self,
        program: Program,
        tokens: MicrobatchTokens,
        update: Callable[[Action], None] | None = None,
        microbatches: Sequence[Microbatch] | None = None,
        loss_factors: Callable[[int], Sequence[float]] = lambda _: (1.0,),
    ) -> dict[int, Tensor]:
        """Execute this rank's actions. `tokens` are the microbatches, each [B, S + 1]; `update` is called at each step
        action. `microbatches` says which samples they are; without it there is no dropout. A microbatch's gradients are
        those of its losses times its `loss_factors`: of its main loss, and of its losses of further tokens.

        Returns the loss of each microbatch on the rank of the last stage, and nothing elsewhere.
        """
        stashed = program.weights != "current" and program.trains
        versions = weight_versions(program) if stashed else {}
        run = _Run(program, tokens, versions, microbatches, loss_factors=loss_factors)
        self._begin(run)
        armings = before_reductions(self.row)
        with torch.set_grad_enabled(program.trains):
            for index, action in enumerate(self.row):
                if self._mesh.watch is not None:
                    self._mesh.watch.doing(f"action {index}, {action}")
                for arming in armings.get(index, ()):
                    self._sharded_stages[arming.stage].arm(arming.is_last, arming.is_split)
                self._perform(action, run, update)
        for _, pending in run.sends:
            pending.wait()
        for weight_stash in self._weight_stashes.values() if stashed else ():
            weight_stash.load(weight_stash.newest)
        return run.losses

    def _begin(self, run: _Run) -> None:
        """Forget the run before."""
        row = self.row = run.program.ranks[self._mesh.pp.index]
        self.losses = run.losses
        for stage, weight_stash in self._weight_stashes.items() if run.versions else ():
            weight_stash.expect([version for (s, _), version in run.versions.items() if s == stage])
        if self._mesh.device.type == "cpu":
            run.sends_by_part = sends_of_parts(row)
        device_streams = self._mesh.streams
        if self._makes_streams and device_streams is not None and any(action.kind is Kind.OVERLAP for action in row):
            self._streams, self._makes_streams = StreamPerStage(device_streams, self._stages), False
        self._times.clear()
        self.peak_alive, self.peak_inputs, self.versions_seen = 0, 0, {}

    def _perform(self, action: Action, run: _Run, update: Callable[[Action], None] | None) -> None:
        """Execute an action, unless it was issued early, and record it with its times."""
        start = self._began = self._times.now()
        if action in run.early_sends:
            start, end = run.early_sends.pop(action)
            self._times.add(action, start, start, end)
            return
        if action.kind is Kind.STEP:
            assert update is not None, "a program that ends in a step needs an optimizer"
            update(action)
        else:
            self._execute(action, run)
        self._times.add(action, start, self._began, self._times.now())
        self.peak_alive = max(self.peak_alive, len(run.alive))
        self.peak_inputs = max(self.peak_inputs, len(run.recompute_inputs))

    def _execute(self, action: Action, run: _Run) -> None:
        """Execute an action of any kind but a step."""
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
                self._sharded_stages[stage].reduce()
            case Kind.GATHER:
                self._sharded_stages[stage].gather()
            case Kind.RELEASE:
                self._sharded_stages[stage].release()
            case _:
                raise NotImplementedError(f"the executor can't perform {action}")

    def _compute(self, action: Action, run: _Run) -> None:
        """Execute a compute action, on the stream of its stage."""
        key = stage, i = action.stage, action.microbatch
        with self._streams.computing(stage):
            match action.kind:
                case Kind.FORWARD:
                    self._forward(key, run)
                case Kind.RECOMPUTE:
                    self._load_weights(key, run)
                    output = self._pass(key, run.recompute_inputs.pop(key), run)
                    if stage == run.program.num_stages - 1:
                        run.losses[i] = output
                case Kind.WEIGHT_GRAD:
                    self._stages[stage].deferred.compute(i)
                    run.alive.discard(key)
                case _:
                    self._backward(key, run, action.kind)

    def _forward(self, key: Key, run: _Run) -> None:
        """Compute a forward once its input is here, and keep the output for the next stage or for its send."""
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
            run.recompute_inputs[key] = x
            with torch.no_grad():
                output = self._pass(key, x, run)
        else:
            output = self._pass(key, x, run)
        if stage == run.program.num_stages - 1:
            run.losses[i] = output  # the loss; a forward that is recomputed has none yet
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
        """The output of a stage, detached. If gradients are on, everything that its backward needs is kept."""
        stage, i = key
        microbatch = None if run.microbatches is None else run.microbatches[i]
        keeps = torch.is_grad_enabled()
        if keeps and stage > 0:
            run.leaves[key] = x.requires_grad_()
        marked_BT = run.tokens[i] if self._separates_documents else None
        if stage == run.program.num_stages - 1:
            # A forward that will be recomputed leaves the loss to the recompute.
            has_loss = keeps or not run.program.trains
            targets_BS = self._ids(run.tokens[i][:, 1:]) if has_loss else None
            output = self._stages[stage](x, targets_BS, microbatch, marked_BT)
        else:
            output = self._stages[stage](x, None, microbatch, marked_BT)
        if keeps:
            # Only the edge is kept: the output's memory is free as soon as it is sent.
            run.edges[key] = get_gradient_edge(output)
            run.alive.add(key)
        return output.detach()

    def _backward(self, key: Key, run: _Run, kind: Kind) -> None:
        """Compute a backward, or its input gradient alone, and keep that for the stage before or for its send."""
        stage, i = key
        self._load_weights(key, run)
        if stage == run.program.num_stages - 1:
            first, *further = (torch.full((), factor, device=self._mesh.device) for factor in run.loss_factors(i))
            gradient = torch.stack((first, *further)) if further else first
        else:
            gradient, arrival = run.gradients.pop(key)
            if arrival is not None:
                arrival.wait()
                self._began = self._times.now()
        split = kind is Kind.INPUT_GRAD
        # Run autograd on this thread, which knows its pass: for CUDA it would otherwise use a thread of its own.
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
        """Run a forward and a backward side by side: while one waits for its communication, the other computes.

        Two threads take turns (parallel/comm/compute_turns.py): on a CPU they compute, and on CUDA they issue work to
        the stream of each pass. Each pass has a communicator of its own. On a CPU the result of one pass is sent while
        the other still computes: Gloo tells messages apart by their tags, so the send may be issued before receives
        that precede it in the program.
        """
        first, second = pair.parts
        stages = [first.stage, second.stage]
        if self._runs_pairs_in_sequence:
            self._streams.fork(stages)
            for part in reversed(pair.parts) if self.reverses_pairs else pair.parts:
                with self._mesh.turns.apart(_pass_of(part)):
                    self._compute(part, run)
            self._streams.join(stages)
            return
        if self._second_thread is None:
            threads = torch.get_num_threads()
            self._second_thread = ThreadPoolExecutor(1, "overlap", torch.set_num_threads, (threads,))
        if (key := (first.stage, first.microbatch)) not in run.program.recomputed:
            run.alive.add(key)  # already now, since both parts are alive at once
        self.peak_alive = max(self.peak_alive, len(run.alive))
        # Every rank begins with the same part: the forward, unless experts are on other ranks. With expert parallelism
        # a backward begins with sending rows of experts, and the forward computes while these travel.
        leader, follower = (second, first) if self._mesh.ep.size > 1 else (first, second)
        self._streams.fork(stages)
        with self._mesh.turns.side_by_side(_pass_of(leader)):
            with self._mesh.turns.taking(_pass_of(leader)):
                future = self._second_thread.submit(self._execute_on_second_thread, follower, run)
                self._execute_part(leader, run)
            with self._mesh.ledger.lanes(-1):
                future.result()
        self._streams.join(stages)

    def _execute_on_second_thread(self, action: Action, run: _Run) -> None:
        # The grad mode belongs to a thread, so it is set here again.
        with self._mesh.ledger.lanes(+1), self._mesh.turns.taking(_pass_of(action)), torch.enable_grad():
            self._execute_part(action, run)

    def _execute_part(self, part: Action, run: _Run) -> None:
        """Execute a part of a pair, and issue the send of its result early, if that may be."""
        self._compute(part, run)
        if (send := run.sends_by_part.get(part)) is not None:
            start = self._times.now()
            self._execute(send, run)
            run.early_sends[send] = start, self._times.now()

    def _send(self, tensor: Tensor, axis: Axis, action: Action, to_stage: int, run: _Run) -> None:
        run.sends = [(buffer, pending) for buffer, pending in run.sends if not pending.is_over()]
        tensor = tensor.contiguous()
        pending = start_send(tensor, axis, action.peer, self._tag(action, to_stage, run))
        run.sends.append((tensor, pending))

    def _receive(self, action: Action, axis: Axis, run: _Run) -> tuple[Tensor, Pending]:
        batch = run.tokens[action.microbatch].shape[0]
        buffer = self._stages[action.stage].empty_hidden(batch)
        return buffer, start_recv(buffer, axis, action.peer, self._tag(action, action.stage, run))

    @staticmethod
    def _tag(action: Action, to_stage: int, run: _Run) -> int:
        """The tag of a message: two stages may exchange messages in both directions over one pair of ranks."""
        is_backward = action.kind in (Kind.SEND_BACKWARD, Kind.RECV_BACKWARD)
        return (to_stage * run.program.num_microbatches + action.microbatch) * 2 + is_backward


def _pass_of(part: Action) -> Pass:
    return "forward" if part.kind is Kind.FORWARD else "backward"
