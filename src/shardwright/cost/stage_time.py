"""The cost of one microbatch on one pipeline rank: its layers' kernels, and the exposed part of their collectives."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from shardwright.config.layer_kind import has_experts, is_layer
from shardwright.config.recompute_policy import ALL_AGAIN
from shardwright.config.software import SoftwareSpec
from shardwright.cost.calibration import Constants, Rates, known_host, rates_of, software_under
from shardwright.cost.collective_time import all_to_all_s, exchange_s, ring_pass_s, ring_s
from shardwright.cost.expert_load import fullest_load, spread_by_bias
from shardwright.cost.group_links import Groups
from shardwright.cost.host_update import host_link
from shardwright.cost.kernels import KernelTime, operator_s
from shardwright.cost.layer_launches import Launches, LayerLaunches
from shardwright.cost.piece_time import Forward, PieceTime, Repeatable, beside
from shardwright.cost.pipeline_bubble import are_put_off, gathers_for_a_pass
from shardwright.cost.split_inputs import input_gather_s
from shardwright.cost.token_copies import copies_to
from shardwright.cost.topology import Group
from shardwright.layers.arrays import Numbers
from shardwright.layers.chains import Chain, chains, kept_bytes, share_run_again
from shardwright.layers.frozen_base import base_bytes
from shardwright.layers.layer_tensors import FLOAT32, HALF
from shardwright.layers.operators import Context, Exchange, Operator
from shardwright.layers.query import Run


@dataclass(frozen=True)
class ExchangeTime:
    """Seconds of one collective by itself, the exposed ones, and the more exposed if weight gradients are put off."""

    exchange: Exchange
    seconds: Numbers
    exposed: Numbers
    put_off: Numbers = 0.0


@dataclass(frozen=True)
class OperatorTime:
    """Seconds of an operator's kernels and collectives. `computed` has the kernels of forward and backward, and
    `kernels` the same in the pass that runs them; `repeated` is the share of its forward that is recomputed."""

    operator: Operator
    computed: KernelTime
    repeated: float
    forward: tuple[ExchangeTime, ...]
    backward: tuple[ExchangeTime, ...]

    @property
    def kernels(self) -> KernelTime:
        """The kernels; all count as input gradient if the operator is computed in the backward."""
        return self.computed.in_backward() if self.operator.in_backward else self.computed

    def ahead(self) -> "Forward":
        """Seconds of the forward alone."""
        tp, cp, ep = _by_axis(self.forward)
        return Forward(self.kernels.forward, tp, cp, ep, flops=self.operator.flops)

    def as_piece(self) -> PieceTime:
        """The operator as a piece of its own, without recompute."""
        kernels, forward = self.kernels, self.ahead()
        tp, cp, ep = _by_axis(self.backward)
        ahead = forward.tensor + forward.context + forward.expert
        return PieceTime(
            kernels.forward, kernels.input_grad, kernels.weight_grad, tensor=forward.tensor + tp,
            context=forward.context + cp, expert=forward.expert + ep, exposed_forward=ahead, flops=forward.flops,
            put_off=sum(part.put_off for part in self.backward),
        )  # fmt: skip


def _by_axis(exchanges: tuple[ExchangeTime, ...]) -> tuple[Numbers, Numbers, Numbers]:
    """The exposed seconds of collectives over (tp, cp, ep)."""
    exposed: dict[str, Numbers] = dict.fromkeys(("tp", "cp", "ep"), 0.0)
    for part in exchanges:
        exposed[part.exchange.axis] += part.exposed
    return exposed["tp"], exposed["cp"], exposed["ep"]


def _first_of_experts(chain: Chain) -> int:
    """Index of the first operator after attention in a layer with experts."""
    return 1 + next(index for index, operator in enumerate(chain) if operator.name == "attention join")


def with_shards(
    run: Run,
    rates: Rates,
    times: PieceTime,
    shard_s: Callable[[], Iterable[Numbers]],
    *,
    hooks_s: Callable[[], tuple[Numbers, Numbers]],
) -> PieceTime:
    """The times of a piece, or of several as arrays, as the schedule and ZeRO-3 have them: weight gradients apart,
    parameters gathered, gradients scattered, and modules hooked. `shard_s` and `hooks_s` are those of Costing, and are
    asked for where a plan shards parameters."""
    grid, software = run.grid, software_under(run)
    times = times.where_split(are_put_off(grid))
    if not np.any(grid.zero == 3):
        return times
    times = times.gathered(rates, software, tuple(shard_s()), gathers_for_a_pass(grid, software.zero))
    if not (software.zero.hooks or software.zero.expert_hooks):
        return times
    return times.hooked(*hooks_s(), is_hooked=grid.zero == 3)


@dataclass(frozen=True)
class Costing:
    """Prices the pieces of one run."""

    run: Run
    software: SoftwareSpec
    rates: Rates
    groups: Groups
    tensor_exposed: Numbers  # exposed share of a tensor-parallel collective that overlaps with its product
    is_narrow: bool

    @classmethod
    def of(cls, run: Run, constants: Constants) -> "Costing":
        """The costing of a run. KeyError names what is unknown."""
        software, grid, rates = software_under(run), run.grid, rates_of(run, constants)
        exposed = np.where(software.tensor_overlap & np.asarray(grid.sequence_parallel), rates.tensor_exposed, 1.0)
        return cls(run, software, rates, Groups(run), tensor_exposed=exposed, is_narrow=grid.is_narrow)

    @cached_property
    def chains(self) -> Mapping[str, Chain]:
        """The operators of each kind of piece."""
        return chains(self.run.shape, self.run.grid, self.software)

    def exchange_s(self, exchange: Exchange) -> Numbers:
        """Seconds of a collective of an operator by itself."""
        rates, group = self.rates, getattr(self.groups, exchange.axis)
        if exchange.kind == "ring":
            return ring_pass_s(rates, group, exchange.size, exchange.rounds)
        if exchange.axis == "ep" and exchange.kind == "all_to_all":
            copies, rank_copies = self._copies_of_tokens(group)
            is_pipelined = self.software.expert_pipelined
            return all_to_all_s(rates, group, exchange.size, copies, rank_copies, is_pipelined) * self._imbalance
        if exchange.kind == "all_to_all":
            return all_to_all_s(rates, group, exchange.size)
        factor = rates.tensor_factor if exchange.axis == "tp" else 1.0
        return exchange_s(rates, group, exchange) * factor

    @cached_property
    def _imbalance(self) -> Numbers:
        """Rows of the fullest expert rank over those of the mean rank."""
        mixture, spread = self.run.shape.experts, np.asarray(self.rates.expert_spread)
        if mixture is None:
            return 1.0
        if mixture.routing == "biased":
            rows, _ = Context(self.run.shape, self.run.grid, self.software).expert_rows
            sequences = rows * mixture.num / mixture.topk / self.run.shape.sequence
            spread = spread_by_bias(self.rates.bias_spread, self.rates.text_spread, sequences)
        return self.rates.imbalance * fullest_load(mixture, self.run.grid.ep, spread)

    def crossing_share(self) -> Numbers:
        """The share of rows sent between domains of fast links, of those sent if no token had two experts in one."""
        mixture, group = self.run.shape.experts, self.groups.ep
        copies, _ = self._copies_of_tokens(group)
        most = 1.0 if mixture is None else np.minimum(mixture.topk, np.maximum(1, group.domains)) / mixture.topk
        return np.minimum(1.0, copies / most)

    def _copies_of_tokens(self, group: Group) -> tuple[Numbers, Numbers]:
        """The shares of a token's copies that cross the network, and that take the fast links."""
        copies: Numbers = 1.0
        rank_copies: Numbers = 1.0
        mixture = self.run.shape.experts
        if mixture is None:
            return copies, rank_copies
        if self.software.expert_dedupe:  # groups of experts are laid over domains
            copies = copies_to(mixture, np.maximum(1, group.domains), mixture.reach)
        if self.software.rank_dedupe:
            rank_copies = copies_to(mixture, np.maximum(1, group.size))
        return copies, rank_copies

    def operators(self, kind: str, policy: str = "none") -> Iterator[OperatorTime]:
        """The operators of a piece, in order: a layer of a kind under a policy, the embedding or the head."""
        is_split = are_put_off(self.run.grid)
        for operator in self._timed(self.chains[kind], kind, policy):
            behind = (replace(e, exposed=e.exposed + e.put_off * is_split, put_off=0.0) for e in operator.backward)
            yield replace(operator, backward=tuple(behind))

    def _timed(self, chain: Chain, kind: str, policy: str) -> Iterator[OperatorTime]:
        rates, is_narrow = self.rates, self.is_narrow and is_layer(kind)
        times = [operator_s(rates, self.software, operator, is_narrow) for operator in chain]
        # The input of a product is the result of the operator before it; with latents, the product's own.
        beside_s = [t.weight_grad for t in (*times[1:], times[-1])]
        weights_s = [t.weight_grad if o.products else s for o, t, s in zip(chain, times, beside_s, strict=True)]
        for operator, t, weight_s in zip(chain, times, weights_s, strict=True):
            imbalance = self._imbalance if operator.layer_operator.is_of_routed_experts else 1.0
            placed = t.in_backward() if operator.in_backward else t
            ahead = self._exposed(operator.forward, placed.forward)
            behind = self._exposed(operator.backward, placed.input_grad + placed.weight_grad, weight_s)
            yield OperatorTime(operator, t.times(imbalance), share_run_again(operator, policy), ahead, backward=behind)

    def gaps(self, kind: str, policy: str = "none") -> PieceTime:
        """Seconds between the kernels of a piece, with the waits for the host."""
        piece, gap_times = self._at_device_pace(kind, policy), self._kernel_gaps(kind, policy)
        waiting = piece.waiting_for_host()
        return replace(
            gap_times,
            forward=gap_times.forward + waiting.forward - piece.forward,
            input_grad=gap_times.input_grad + waiting.input_grad - piece.input_grad,
        )

    def _kernel_gaps(self, kind: str, policy: str) -> PieceTime:
        """Seconds between the kernels of a piece, and of their launches."""
        if not is_layer(kind):
            return PieceTime()
        gap_times = self._gaps_before_experts(kind)
        if has_experts(kind):
            gap_times += self._gaps_of_experts(kind)
        if policy not in ALL_AGAIN:
            return gap_times
        launched = gap_times.launched_backward + gap_times.launched_forward
        return replace(gap_times, again=gap_times.forward, launched_backward=launched)

    def _gaps_before_experts(self, kind: str) -> PieceTime:
        gaps = self._gaps_of(self._launches.before_experts(kind, self.chain_before_experts(kind)))
        return replace(gaps, launched_forward=0.0, launched_backward=0.0) if self.software.graphs_parts else gaps

    def _gaps_of_experts(self, kind: str) -> PieceTime:
        chain = self.chains[kind]
        return self._gaps_of(self._launches.of_experts(chain[_first_of_experts(chain) :]))

    def _gaps_of(self, launches: Launches) -> PieceTime:
        (forward, backward), (host_forward, host_backward) = launches.kernels, launches.host
        return PieceTime(
            forward=self.rates.gap_s * forward,
            input_grad=self.rates.gap_s * backward,
            launched_forward=self._launch_s * host_forward,
            launched_backward=self._launch_s * host_backward,
        )

    @property
    def _launches(self) -> LayerLaunches:
        return LayerLaunches(self.run, self.software, self.is_narrow)

    @property
    def _launch_s(self) -> float:
        return 0.0 if self.software.graphs_step else self.rates.launch_s

    def hooks_s(self, kind: str, policy: str) -> tuple[Numbers, Numbers]:
        """Seconds of the host (in the forward, in the backward) around a piece's modules under ZeRO-3, if the software
        has such hooks, where parameters are gathered. Layers that are computed again are hooked again."""
        zero = self.software.zero
        if not is_layer(kind) or not (zero.hooks or zero.expert_hooks):
            return 0.0, 0.0
        hooks = self._launches.of_hooks(kind) * gathers_for_a_pass(self.run.grid, zero)[0]
        return self._launch_s * hooks, self._launch_s * hooks * (2 if policy in ALL_AGAIN else 1)

    def piece(self, kind: str, policy: str = "none") -> PieceTime:
        """Seconds of one layer of a kind under a recompute policy, of the embedding or of the head."""
        return self._at_device_pace(kind, policy).waiting_for_host()

    def _at_device_pace(self, kind: str, policy: str) -> PieceTime:
        """Seconds of a piece whose host is never late."""
        if (kind, policy) not in self._pieces:
            self._pieces[kind, policy] = self._priced(kind, policy)
        return self._pieces[kind, policy]

    @cached_property
    def _pieces(self) -> dict[tuple[str, str], PieceTime]:
        """The pieces priced so far, by (kind, policy). `piece` and `gaps` read them."""
        return {}

    def _priced(self, kind: str, policy: str) -> PieceTime:
        operators = self.before_experts(kind)
        if has_experts(kind):
            operators += self.experts()
        times = self.repeating(kind, policy, operators)
        shard_s, hooks_s = partial(self.shard_s, kind), partial(self.hooks_s, kind, policy)
        return with_shards(self.run, self.rates, times, shard_s, hooks_s=hooks_s)

    def before_experts(self, kind: str) -> Repeatable:
        """The time of the operators before the experts of a piece. It does not depend on where experts are placed."""
        gaps = self._gaps_before_experts(kind) if is_layer(kind) else PieceTime()
        return self._repeatable(self.chain_before_experts(kind), kind, gaps)

    def chain_before_experts(self, kind: str) -> Chain:
        """The operators before the experts of a piece."""
        chain = self.chains[kind]
        return chain[: _first_of_experts(chain)] if has_experts(kind) else chain

    def experts(self) -> Repeatable:
        """The time of the experts of a piece, and of the operators after them."""
        kind, chain = next(item for item in self.chains.items() if has_experts(item[0]))  # their experts are alike
        return self._repeatable(chain[_first_of_experts(chain) :], kind, self._gaps_of_experts(kind))

    def _repeatable(self, chain: Chain, kind: str, total: PieceTime) -> Repeatable:
        forwards = []
        for operator in self._timed(chain, kind, "none"):
            total += operator.as_piece()
            forwards.append(operator.ahead())
        return Repeatable(total, tuple(forwards))

    def repeating(self, kind: str, policy: str, piece: Repeatable) -> PieceTime:
        """The time of a piece under a recompute policy; kept tensors stay on the device or go to its host."""
        gap_times = self._kernel_gaps(kind, policy)
        again, tensor, context, expert, flops = gap_times.again, 0.0, 0.0, 0.0, 0.0
        for operator, forward in zip(self.chains[kind], piece.forwards, strict=True):
            if share := share_run_again(operator, policy):
                again, flops = again + share * forward.compute, flops + share * forward.flops
                tensor, context = tensor + share * forward.tensor, context + share * forward.context
                expert = expert + share * forward.expert
        if is_layer(kind) and policy == "full":
            kept = kept_bytes(self.chains[kind], policy)
            tensor = tensor + input_gather_s(self.run, self.software, self.rates, self.groups.tp, kept=kept)
        total = piece.once + PieceTime(again=again, tensor=tensor, context=context, expert=expert, flops_again=flops)
        total = replace(total, launched_backward=gap_times.launched_backward)
        if is_layer(kind) and np.any(self.run.grid.offload_activations):
            total += self._sent_away(total, kind, policy)
        return total

    def _exposed(
        self, exchanges: tuple[Exchange, ...], compute_s: Numbers, weight_s: Numbers = 0.0
    ) -> tuple[ExchangeTime, ...]:
        """The exposed seconds of an operator's collectives. `weight_s` are the seconds of the weight gradient that may
        hide them."""
        times = []
        for exchange in exchanges:
            if not np.any(exchange.size):  # no plan has it
                continue
            exposed = seconds = self.exchange_s(exchange)
            put_off: Numbers = 0.0
            if exchange.kind == "ring":  # the next keys come while these are used
                exposed = beside(self.rates, seconds, compute_s)
            elif exchange.axis == "cp":
                pass
            elif exchange.beside_weights and self.software.sum_overlap:
                exposed = np.minimum(beside(self.rates, seconds, weight_s), seconds * self.tensor_exposed)
                put_off = (seconds - exposed) * exchange.is_put_off
            elif exchange.axis == "tp":
                exposed = seconds * (self.rates.leak if exchange.is_hidden else self.tensor_exposed)
            elif self.run.grid.is_paired and self.software.pair_overlap:  # another microbatch computes meanwhile
                exposed = seconds * self.rates.leak
            elif self.software.expert_overlap:
                exposed = seconds * self.rates.expert_exposed
            times.append(ExchangeTime(exchange, seconds, exposed, put_off))
        return tuple(times)

    def _sent_away(self, piece: PieceTime, kind: str, policy: str) -> PieceTime:
        """Exposed copies of kept tensors to the host during a layer's forward, and back during a backward."""
        away_s = self._host_s(kept_bytes(self.chains[kind], policy) * np.asarray(self.run.grid.offload_activations))
        ahead = beside(self.rates, away_s, piece.forward)
        return PieceTime(host=ahead + beside(self.rates, away_s, piece.backward), exposed_forward=ahead)

    def _host_s(self, size_bytes: Numbers) -> Numbers:
        """Seconds of a copy between device and host. KeyError if the link is unknown."""
        return size_bytes / host_link(self.software, known_host(self.run, self.rates))

    def shard_s(self, kind: str) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """ZeRO-3: seconds of (gathering the parameters of a piece, scattering their gradients, copies behind a gather,
        copies before a scatter) by themselves.

        Shards on the host are copied to the device before each gather. The other copies are kernels in the order of
        those that compute (`zero.copied` of the software).
        """
        shape, grid, rates, groups = self.run.shape, self.run.grid, self.rates, self.groups
        common, routed = shape.kind_parameters(kind) if is_layer(kind) else (shape.table_elements, 0)
        if kind == "mtp":  # replicated over tp
            common = shape.further_parameters * grid.tp
        gather, scatter, behind, before = 0.0, 0.0, 0.0, 0.0
        element_bytes = grid.gathered_bytes(self.software.float8_gather and is_layer(kind))
        stored = base_bytes(shape, kind, grid) if shape.adapter.row_format and is_layer(kind) else (None, None)
        for elements, stored_bytes, shard, copies in (
            (common / grid.tp, stored[0], groups.shard, groups.copies),
            (routed / (grid.ep * grid.expert_tp), stored[1], groups.expert_shard, groups.expert_copies),
        ):
            elements = elements * (grid.zero == 3)
            gradients = (
                self.software.scattered_bytes * elements * (not shape.is_adapted)
            )  # adapters' are too small to tell
            values = (FLOAT32 if self.software.zero.gathers_wide else element_bytes) * elements
            if stored_bytes is not None:
                values = stored_bytes * (grid.zero == 3)
            if self.software.zero.whole_experts and shard is groups.expert_shard:
                scatter += ring_s(rates, shard, gradients, 2) + ring_s(rates, copies, gradients, 2)
                continue
            gather += self._pieces_s(shard, values)
            if np.any(grid.offload_parameters):
                gather += self._host_s(values / shard.size * np.asarray(grid.offload_parameters))
            scatter += self._pieces_s(shard, gradients, True) + ring_s(rates, copies, gradients / shard.size, 2)
            is_cut, copied = (np.asarray(shard.size) > 1) / rates.memory_bytes_per_s, self.software.zero.copied
            behind, before = behind + copied[0] * values / HALF * is_cut, before + copied[1] * elements * is_cut
        return gather, scatter, behind, before * (not shape.is_adapted)

    def _pieces_s(self, shard: Group, size_bytes: Numbers, scatters: bool = False) -> Numbers:
        """Seconds to gather or scatter a layer's shards: all at once, or tensor by tensor."""
        pieces = self.software.shard_pieces
        return self.rates.shard_factor * pieces * ring_s(self.rates, shard, size_bytes / pieces, scatters=scatters)
