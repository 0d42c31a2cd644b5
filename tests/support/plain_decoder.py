"""Every kind of model once more, as plainly as torch allows: autograd, float64, one process, torch's AdamW.

The decoder is written from its description, one sample at a time, over a dict of parameters by the names that the
runtime gives them. Nothing is shared with it but its initial weights and its random numbers (dropout, and the second
expert of GShard's gate): those are functions of a place, which a plain implementation must know too. Experts are chosen
by the loops of moe_reference.py.

Shape suffixes: S sequence, H hidden, N heads, D width of a head's query and key, E width of its value or number of
experts, F inner width of the MLP, V vocabulary, T tokens of a microbatch.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.config.job import JobSpec
from shardwright.config.moe import MoeSpec
from shardwright.model.dropout import LEVELS, kept_elements
from shardwright.model.router import ROWS_OF_A_SAMPLE
from shardwright.parallel.tensor.counter_rng import stream_key, uniform
from shardwright.sharding.stage_parameters import model_parameters
from shardwright.sharding.token_marks import FILLING, UNCOUNTED
from support import moe_reference
from support.plain_attention import attended, is_turned, reached, rotated

Weights = dict[str, Tensor]


@dataclass
class Memory:
    """The memory of one layer's router from step to step, and its counts in this one."""

    bias: list[float]
    shares: list[float]
    together: list[list[float]]
    chosen: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    pairs: list[list[int]] = field(default_factory=list)
    tokens: int = 0

    @classmethod
    def of(cls, moe: MoeSpec) -> "Memory":
        """The memory before the first step."""
        E = moe.experts
        memory = cls([0.0] * E, [1.0 / E] * E, [[0.0] * E for _ in range(E)])
        memory.forget(E)
        return memory

    def forget(self, E: int) -> None:
        """Begin a step."""
        self.chosen, self.first, self.tokens = [0] * E, [0] * E, 0
        self.pairs = [[0] * E for _ in range(E)]

    def see(self, routed: moe_reference.Routed) -> None:
        """Count the choices of a microbatch."""
        for experts in routed.experts:
            self.tokens += 1
            for i, expert in enumerate(experts):
                self.chosen[expert] += 1
                self.first[expert] += i == 0
                for other in experts:
                    self.pairs[expert][other] += other != expert

    def learn(self, moe: MoeSpec) -> None:
        """End a step."""
        mean = sum(self.chosen) / moe.experts
        for e, count in enumerate(self.chosen):
            self.bias[e] += moe.bias_update * ((count < mean) - (count > mean))
        counts, choices = (self.first, 1) if moe.aux_loss == "gshard" else (self.chosen, moe.num_chosen)
        if self.tokens:
            self.shares = [count / (self.tokens * choices) for count in counts]
        for row, seen in zip(self.together, self.pairs, strict=True):
            row[:] = [moe.co_activation_decay * a + b for a, b in zip(row, seen, strict=True)]
        self.forget(moe.experts)


def _is_real(tokens_BT: Tensor) -> Tensor:
    """True for each token that is more than filling: one that fills a sample up has its mark."""
    return torch.where(tokens_BT < 0, -1 - tokens_BT, tokens_BT) // FILLING == 0


@dataclass(frozen=True)
class ParameterShard:
    """Which samples of which step a microbatch is; None instead of it in an evaluation."""

    seed: int
    step: int
    first_sample: int


class PlainDecoder:
    """The model of a job, and what training it means."""

    def __init__(self, job: JobSpec, weights: Weights) -> None:
        """`weights` are full tensors by name, float64; they are trained in place."""
        self.job, self.spec, self.weights = job, job.model, weights
        moe = self.spec.moe
        further = [f"mtp.{k}.block" for k in range(self.spec.mtp_layers)]
        layers = [f"layers.{layer}" for layer in range(self.spec.layers)]
        with_experts = [name for layer, name in enumerate(layers) if moe.has_experts(layer)]
        with_experts += further if moe.has_experts(self.spec.layers - 1) else []
        self.memories = {name: Memory.of(moe) for name in with_experts}
        drawn = {place.name for place in model_parameters(self.spec) if place.init == "normal"}
        optimizer = job.optimizer
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [w for name, w in weights.items() if name in drawn], "weight_decay": optimizer.weight_decay},
                {"params": [w for name, w in weights.items() if name not in drawn], "weight_decay": 0.0},
            ],
            lr=1.0, betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.epsilon,
        )  # fmt: skip
        for weight in weights.values():
            weight.requires_grad_()

    # Training.

    def step(self, step: int, tokens_BT: Tensor) -> tuple[float | None, float | None]:
        """Train on a global batch, [B, S + 1]. Returns its loss and the norm of its gradient; of a batch without a
        target there is neither, and it changes nothing."""
        has_targets = [bool(self._counts(tokens_BT, k).any()) for k in range(1 + self.spec.mtp_layers)]
        if not has_targets[0]:
            self.further_losses = [None] * self.spec.mtp_layers
            return None, None
        self.optimizer.zero_grad()
        total, further, pressure, num_microbatches = self._losses(tokens_BT, step)
        weight = self.spec.mtp_weight / max(1, self.spec.mtp_layers)
        ((total + weight * sum(further) + pressure) / num_microbatches).backward()
        gradients = [w.grad for w in self.weights.values() if w.grad is not None]
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        clip = self.job.optimizer.clip_grad_norm
        factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        for weight in self.weights.values():
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad * factor
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(step)
        self.optimizer.step()
        for memory in self.memories.values():
            memory.learn(self.spec.moe)
        self.further_losses = [
            float(one.detach()) / num_microbatches if has else None
            for one, has in zip(further, has_targets[1:], strict=True)
        ]
        return float(total.detach()) / num_microbatches, norm

    def evaluate(self, tokens_BT: Tensor) -> float | None:
        """The mean loss of a global batch, if it has a target."""
        with torch.no_grad():
            total, _, _, num_microbatches = self._losses(tokens_BT, None)
        return float(total) / num_microbatches if self._counts(tokens_BT, 0).any() else None

    def _losses(self, tokens_BT: Tensor, step: int | None) -> tuple[Tensor, list[Tensor], Tensor, int]:
        """Sums over microbatches of their mean losses, of those of further tokens, and of what keeps experts even; and
        how many there are."""
        size = self.job.plan.microbatch_size
        pressure = torch.zeros((), dtype=torch.float64)
        totals = [pressure] * (1 + self.spec.mtp_layers)
        counted = [float(self._counts(tokens_BT, k).double().mean()) or 1.0 for k in range(len(totals))]
        real = float(_is_real(tokens_BT[:, :-1]).double().mean()) or 1.0
        for first in range(0, len(tokens_BT), size):
            place = None if step is None else ParameterShard(self.job.run.seed, step, first)
            losses, added = self._microbatch(tokens_BT[first : first + size], place)
            totals = [total + loss / share for total, loss, share in zip(totals, losses, counted, strict=False)]
            pressure = pressure + added / real
        return totals[0], totals[1:], pressure, len(tokens_BT) // size

    def _counts(self, tokens_BT: Tensor, k: int) -> Tensor:
        """Of each position, whether the token k + 1 further is there, in its document, and to be learned, [B, S]."""
        B, S = len(tokens_BT), self.spec.sequence
        numbers = (tokens_BT < 0).long().cumsum(1)
        result = torch.zeros(B, S, dtype=torch.bool)
        for i in range(S - k):
            is_same = numbers[:, i] == numbers[:, i + k + 1]
            is_asked = tokens_BT[:, i + k + 1] < UNCOUNTED
            result[:, i] = is_same & is_asked if self.job.data.separate_documents else True
        return result

    def _rate(self, step: int) -> float:
        o = self.job.optimizer
        if step < o.warmup_steps:
            return o.learning_rate * (step + 1) / o.warmup_steps
        done = min(1.0, (step - o.warmup_steps) / max(1, o.steps - o.warmup_steps))
        low = o.learning_rate * o.min_learning_rate_ratio
        return low + (o.learning_rate - low) * (1 + math.cos(math.pi * done)) / 2

    # The model.

    def _microbatch(self, tokens_BT: Tensor, place: ParameterShard | None) -> tuple[list[Tensor], Tensor]:
        """The mean over all positions of the losses of those that count, of the next token and in training of those
        further; and the losses of the routers."""
        spec = self.spec
        ids_BT = torch.where(tokens_BT < 0, -1 - tokens_BT, tokens_BT) % UNCOUNTED
        documents_BT = (tokens_BT < 0).long().cumsum(1)
        self.real_BS = _is_real(tokens_BT[:, :-1])
        separate = self.job.data.separate_documents
        self.positions_BS = torch.arange(spec.sequence).expand(len(tokens_BT), -1).clone()
        if separate:
            for b, i in torch.nonzero(tokens_BT[:, :-1] < 0).tolist():
                self.positions_BS[b, i:] = torch.arange(spec.sequence - i)
        table = self.weights["embedding.weight"] * spec.embedding_scale
        x_BSH = table[ids_BT[:, :-1]]
        if spec.positions == "learned":
            x_BSH = x_BSH + self.weights["positions.weight"][spec.position_offset + self.positions_BS]
        if spec.embedding_norm:
            x_BSH = self._norm(x_BSH, "embedding_norm")
        x_BSH = self._dropped(x_BSH, "embedding", place)
        sees_BSS = torch.ones(spec.sequence, spec.sequence, dtype=torch.bool).tril().expand(len(x_BSH), -1, -1)
        if separate:
            numbers_BS = documents_BT[:, :-1]
            sees_BSS = sees_BSS & (numbers_BS[:, :, None] == numbers_BS[:, None, :])
        pressure = torch.zeros((), dtype=torch.float64)
        for layer in range(spec.layers):
            x_BSH, added = self._block(x_BSH, f"layers.{layer}", sees_BSS, place)
            pressure = pressure + added
        losses = [self._loss(self._norm(x_BSH, "norm"), tokens_BT, 0)]
        for k in range(1, 1 + spec.mtp_layers) if place is not None else ():
            name = f"mtp.{k - 1}"
            further_BS = torch.zeros_like(ids_BT[:, 1:])  # what stands behind the end is seen by nobody that counts
            further_BS[:, : spec.sequence + 1 - k] = ids_BT[:, k:]
            embedded = self._norm(table[further_BS], f"{name}.embedding_norm")
            joined = torch.cat((embedded, self._norm(x_BSH, f"{name}.hidden_norm")), dim=-1)
            if separate:  # where a document has ended before the token that is seen
                self.real_BS = _is_real(tokens_BT[:, :-1])
                for i in range(spec.sequence):
                    goes_on = i + k < documents_BT.shape[1] and documents_BT[:, i] == documents_BT[:, i + k]
                    self.real_BS[:, i] &= goes_on
            x_BSH = joined @ self.weights[f"{name}.project.weight"].t()
            x_BSH, added = self._block(x_BSH, f"{name}.block", sees_BSS, place)
            pressure = pressure + added
            losses.append(self._loss(self._norm(x_BSH, f"{name}.norm"), tokens_BT, k))
        return losses, pressure

    def _block(self, x_BSH: Tensor, name: str, sees_BSS: Tensor, place: ParameterShard | None) -> tuple[Tensor, Tensor]:
        """A transformer block, and the losses of its router."""
        spec, none = self.spec, torch.zeros((), dtype=torch.float64)
        attend = self._latent_attention if spec.is_latent else self._attention
        number = int(name.split(".")[1]) if name.startswith("layers") else spec.layers - 1

        def normal(y: Tensor, which: str, where: str) -> Tensor:
            return self._norm(y, f"{name}.{which}") if spec.norm_place in (where, "around") else y

        if spec.parallel_block != "none":
            first = self._norm(x_BSH, f"{name}.attention_norm")
            second = first if spec.parallel_block == "one-norm" else self._norm(x_BSH, f"{name}.mlp_norm")
            y_BSH = attend(first, f"{name}.attention", sees_BSS, number) + self._mlp(second, f"{name}.mlp")
            return x_BSH + spec.residual_scale * self._dropped(y_BSH, f"{name}.mlp", place), none
        y_BSH = attend(normal(x_BSH, "attention_norm", "before"), f"{name}.attention", sees_BSS, number)
        y_BSH = self._dropped(normal(y_BSH, "attention_out_norm", "after"), f"{name}.attention", place)
        x_BSH = x_BSH + spec.residual_scale * y_BSH
        taken, added = normal(x_BSH, "mlp_norm", "before"), none
        if name in self.memories:
            y_BSH, added = self._experts(taken, name, place)
        else:
            y_BSH = self._mlp(taken, f"{name}.mlp")
        y_BSH = self._dropped(normal(y_BSH, "mlp_out_norm", "after"), f"{name}.mlp", place)
        return x_BSH + spec.residual_scale * y_BSH, added

    def _loss(self, normal_BSH: Tensor, tokens_BT: Tensor, k: int) -> Tensor:
        """The mean over all positions of the losses of tokens k + 1 further, where these count."""
        head = self.weights["embedding.weight" if self.spec.tied_embeddings else "head.weight"]
        logits_BSV = (normal_BSH @ head.t() + self.weights.get("head.bias", 0.0)) * self.spec.logit_scale
        counts_BS = self._counts(tokens_BT, k)
        if self.spec.logit_softcap:
            logits_BSV = self.spec.logit_softcap * (logits_BSV / self.spec.logit_softcap).tanh()
        ids_BT, S = torch.where(tokens_BT < 0, -1 - tokens_BT, tokens_BT) % UNCOUNTED, self.spec.sequence
        losses_BS = functional.cross_entropy(
            logits_BSV[:, : S - k].transpose(1, 2), ids_BT[:, 1 + k :], reduction="none"
        )
        return (losses_BS * counts_BS[:, : S - k]).sum() / counts_BS.numel()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights.get(f"{name}.weight", torch.ones(x.shape[-1], dtype=x.dtype))
        if self.spec.norm == "layernorm":
            bias = self.weights.get(f"{name}.bias")
            return functional.layer_norm(x, weight.shape, weight, bias, self.spec.norm_epsilon)
        return x / (x.square().mean(-1, keepdim=True) + self.spec.norm_epsilon).sqrt() * weight

    def _dropped(self, x_BSH: Tensor, where: str, place: ParameterShard | None) -> Tensor:
        levels = min(round(self.spec.dropout * LEVELS), LEVELS - 1)
        if levels == 0 or place is None:
            return x_BSH
        B, S, H = x_BSH.shape
        rows_SB = torch.arange(S)[:, None] + (place.first_sample + torch.arange(B)) * S
        kept_SBH = kept_elements(rows_SB, H, stream_key(place.seed, place.step, f"dropout {where}"), levels)
        return x_BSH * kept_SBH.transpose(0, 1) * (LEVELS / (LEVELS - levels))

    def _product(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        y = x @ weight.view(-1, weight.shape[-1]).t()
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _norm_of_all(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm over the heads of all groups."""
        mean = x.square().mean((2, 3, 4), keepdim=True)
        return x / (mean + self.spec.norm_epsilon).sqrt() * self.weights[f"{name}.weight"]

    def _attention(self, x_BSH: Tensor, name: str, sees_BSS: Tensor, number: int) -> Tensor:
        spec = self.spec
        B, S, _ = x_BSH.shape
        groups, queries, width = spec.num_kv_heads, spec.heads // spec.num_kv_heads, spec.head_size
        qkv = self._product(x_BSH, f"{name}.qkv").view(B, S, groups, queries + 2, width)
        if spec.has_attention_bias or spec.qkv_bias:
            qkv = qkv + self.weights[f"{name}.qkv_bias"]
        q, k, v = qkv.split((queries, 1, 1), dim=3)
        if spec.qk_norm == "full":
            q, k = (self._norm_of_all(x, f"{name}.{which}_norm") for which, x in (("q", q), ("k", k)))
        if spec.clip_qkv:
            q, k, v = (x.clamp(-spec.clip_qkv, spec.clip_qkv) for x in (q, k, v))
        if spec.qk_norm == "head":
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        if is_turned(spec, number):
            q, k = (rotated(spec, x, is_interleaved=False, layer=number) for x in (q, k))
            if spec.qk_norm == "l2":
                q, k = (x / (x.square().mean(-1, keepdim=True) + spec.norm_epsilon).sqrt() for x in (q, k))
        if spec.qk_norm == "head-turned":
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        tuning = spec.temperature_tuning
        if tuning.scale and (tuning.in_all_layers or not is_turned(spec, number)):
            steps_BS = (self.positions_BS.double() + tuning.first_position).div(tuning.floor).floor()
            q = q * (1 + tuning.scale * (1 + steps_BS).log())[..., None, None, None]
        k, v = k.expand(-1, -1, -1, queries, -1), v.expand(-1, -1, -1, queries, -1)
        heads = (x.reshape(B, S, spec.heads, width) for x in (q, k, v))
        sinks = self.weights[f"{name}.sinks"].flatten() if spec.sinks else None
        sees_BSS = sees_BSS & reached(spec, number, self.positions_BS)
        out = attended(spec, *heads, sees_BSS, sinks)
        return self._product(out.reshape(B, S, -1), f"{name}.out")

    def _latent_attention(self, x_BSH: Tensor, name: str, sees_BSS: Tensor, number: int) -> Tensor:
        spec, latent = self.spec, self.spec.latent
        B, S, _ = x_BSH.shape
        widths = (latent.q_rank, latent.kv_rank, latent.rope_dim)
        for_queries, for_keys, rope = self._product(x_BSH, f"{name}.down").split(widths, dim=-1)
        source = self._norm(for_queries, f"{name}.q_norm") if latent.q_rank else x_BSH
        q = self._product(source, f"{name}.q_up").view(B, S, spec.heads, -1)
        kv = self._product(self._norm(for_keys, f"{name}.kv_norm"), f"{name}.kv_up").view(B, S, spec.heads, -1)
        k_plain, v = kv.split((latent.nope_dim, latent.value_dim), dim=-1)
        q_plain, q_turned = q.split((latent.nope_dim, latent.rope_dim), dim=-1)
        q_turned = rotated(spec, q_turned[:, :, :, None], is_interleaved=True).squeeze(3)
        k_turned = rotated(spec, rope[:, :, None, None], is_interleaved=True).squeeze(3)
        q = torch.cat((q_plain, q_turned), dim=-1)
        k = torch.cat((k_plain, k_turned.expand(-1, -1, spec.heads, -1)), dim=-1)
        out = attended(spec, q, k, v, sees_BSS)
        return self._product(out.reshape(B, S, -1), f"{name}.out")

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        up = self._product(x, f"{name}.up")
        if f"{name}.up_bias" in self.weights:
            up = up + self.weights[f"{name}.up_bias"].flatten()
        return self._product(self._activated(up), f"{name}.down")

    def _activated(self, up: Tensor) -> Tensor:
        function = {
            "silu": functional.silu,
            "gelu": functional.gelu,
            "gelu-tanh": lambda x: functional.gelu(x, approximate="tanh"),
            "relu": functional.relu,
            "relu2": lambda x: functional.relu(x) ** 2,
            "quick-gelu": lambda x: x * (1.702 * x).sigmoid(),
            "clamped-silu": lambda x: x.clamp(max=7) * (1.702 * x.clamp(max=7)).sigmoid(),
        }[self.spec.activation]
        if not self.spec.gated_mlp:
            return function(up)
        gate, rest = up.chunk(2, dim=-1)
        return function(gate) * (rest.clamp(-7, 7) + 1 if self.spec.activation == "clamped-silu" else rest)

    def _experts(self, x_BSH: Tensor, block: str, place: ParameterShard | None) -> tuple[Tensor, Tensor]:
        """The output of the experts for a microbatch, and the losses of their router."""
        moe, name = self.spec.moe, f"{block}.moe"
        B, S, H = x_BSH.shape
        x_TH = x_BSH.transpose(0, 1).reshape(-1, H)  # in order of position, as experts fill
        logits_TE = x_TH @ self.weights[f"{name}.router.weight"].t()
        logits_TE = logits_TE + self.weights.get(f"{name}.router.bias", torch.zeros(moe.experts, dtype=x_TH.dtype))
        # As if there were no filling: its rows are left out, and experts give nothing for them.
        real_R = self.real_BS.t().flatten().nonzero().flatten()
        logits_RE = logits_TE[real_R]
        memory, rows = self.memories[block], logits_RE.tolist()
        draws = None
        if moe.gate == "gshard" and place is not None:
            samples = (place.first_sample + torch.arange(B)) * ROWS_OF_A_SAMPLE
            numbers = (torch.arange(S)[:, None] + samples).flatten()[real_R]
            key = stream_key(place.seed, place.step, f"second expert {block}")
            draws = uniform(numbers, key).tolist()
        routed = moe_reference.route(moe, rows, memory.bias, memory.together, draws)
        seated = moe_reference.with_room(moe, rows, routed)
        weights_TE = torch.zeros_like(logits_TE).index_add(0, real_R, self._weights(logits_RE, routed, seated))
        y_TH = torch.zeros_like(x_TH)
        for e, weight_T1 in enumerate(weights_TE.split(1, dim=1)):
            if moe.weigh == "input":
                y_TH = y_TH + (weight_T1.detach() != 0) * self._expert(weight_T1 * x_TH, name, e)
            else:
                y_TH = y_TH + weight_T1 * self._expert(x_TH, name, e)
        added = torch.zeros((), dtype=torch.float64)
        if place is not None:
            memory.see(routed)
            if len(real_R):
                losses = self._router_losses(logits_RE, routed, (real_R % B).tolist(), memory.shares)
                added = losses * len(real_R) / len(x_TH)
        y_BSH = y_TH.view(S, B, H).transpose(0, 1)
        if moe.shared_experts:
            shared = self._mlp(x_BSH, f"{name}.shared")
            if moe.shared_gate:
                shared = shared * (x_BSH @ self.weights[f"{name}.shared_gate"].t()).sigmoid()
            y_BSH = y_BSH + shared
        return y_BSH, added

    def _expert(self, x_TH: Tensor, name: str, e: int) -> Tensor:
        up_KFH, down_HF = self.weights[f"{name}.experts.up"][e], self.weights[f"{name}.experts.down"][e]
        up = x_TH @ up_KFH.flatten(0, 1).t()
        if not self.spec.bias:
            return self._activated(up) @ down_HF.t()
        up_bias, down_bias = self.weights[f"{name}.experts.up_bias"][e], self.weights[f"{name}.experts.down_bias"][e]
        return self._activated(up + up_bias.flatten()) @ down_HF.t() + down_bias

    def _weights(self, logits_TE: Tensor, routed: moe_reference.Routed, seated: list[dict[int, float]]) -> Tensor:
        """The weight of each token's experts, 0 for others: the numbers of the loops, with a gradient."""
        moe = self.spec.moe
        scores_TE = logits_TE.sigmoid() if moe.gate == "sigmoid" else logits_TE.softmax(-1)
        divides = moe.gate == "gshard" or (moe.gate in moe_reference.NORMALISING and moe.normalise)
        rows = []
        for t, chosen in enumerate(seated):
            seats_E = torch.tensor([float(e in chosen) for e in range(moe.experts)], dtype=torch.float64)
            row_E = scores_TE[t] * seats_E * moe.routed_scaling
            rows.append(row_E / scores_TE[t, routed.weighed[t]].sum() if divides else row_E)
        return torch.stack(rows) if rows else logits_TE

    def _router_losses(
        self, logits_TE: Tensor, routed: moe_reference.Routed, samples: list[int], shares: list[float]
    ) -> Tensor:
        """The balance loss and the z-loss of a microbatch; token t is of sample samples[t]."""
        moe, E, T = self.spec.moe, self.spec.moe.experts, len(logits_TE)
        total = moe.z_coefficient * logits_TE.logsumexp(-1).square().mean()
        if moe.aux_loss == "none":
            return total
        scores_TE = logits_TE.sigmoid() if moe.gate == "sigmoid" else logits_TE.softmax(-1)
        likelihood_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
        by_sample = [[t for t in range(T) if samples[t] == b] for b in sorted(set(samples))]
        groups = by_sample if moe.aux_scope == "sequence" else [list(range(T))]
        for group in groups:
            factor = moe.aux_coefficient * (1 / E if moe.aux_loss == "gshard" else E) * len(group) / T
            for e in range(E):
                if moe.aux_scope == "global":
                    share = shares[e]
                elif moe.aux_loss == "gshard":
                    share = sum(routed.experts[t][0] == e for t in group) / len(group)
                else:
                    share = sum(e in routed.experts[t] for t in group) / (len(group) * moe.num_chosen)
                total = total + factor * share * likelihood_TE[group, e].mean()
        return total
