"""Mixture of experts: many MLPs in place of one; a gate chooses a few of them for each token. Shazeer et al. 2017
(arXiv 1701.06538)."""

import json
import math
from typing import Any, Literal, get_args

from pydantic import Field

from shardwright.config.base import Spec
from shardwright.config.field_types import (
    Experts,
    ExpertsOr0,
    Layers,
    LayersOr0,
    Positive,
    PositiveOr0,
    Probability,
    WidthOr0,
)
from shardwright.config.gate_facts import GATES, GateFacts, GateName, optional_reads
from shardwright.config.phrase import say

Overflow = Literal["drop-position", "drop-probability", "reroute"]
AuxLoss = Literal["none", "switch", "gshard"]
Scope = Literal["microbatch", "sequence", "global"]
Routing = Literal["forced", "in-turn", "biased", "balanced", "free"]
ROUTINGS: tuple[Routing, ...] = get_args(Routing)


def is_routed(layer: int, first_dense: int, every: int) -> bool:
    """True if a layer has experts, in a model that has some: the last of every `every` layers after the first dense
    ones."""
    number = layer - first_dense
    return number >= 0 and number % every == every - 1


class MoeSpec(Spec):
    """The experts of a model, the gate that chooses them, and the balance of their use. Without experts a model is
    dense."""

    experts: ExpertsOr0 = Field(
        0, description="Experts of a layer, of which each token gets a few; 0 means a dense model."
    )
    top_k: ExpertsOr0 = Field(0, description="Experts of a token; 0 means 1 for the switch gate and 2 for others.")
    ffn: WidthOr0 = Field(
        0,
        description="Width inside an expert; 0 means that of the model's MLP, which dense layers have. Experts have "
        "biases where model.bias is set.",
    )
    shared_experts: ExpertsOr0 = Field(0, description="Experts that every token gets besides, computed as one MLP.")
    shared_ffn: WidthOr0 = Field(0, description="Width inside a shared expert; 0 means that of the others.")
    shared_gate: bool = Field(
        False, description="Weigh what the shared experts give with the sigmoid of one more product (Qwen2-MoE)."
    )
    first_dense: LayersOr0 = Field(0, description="Layers at the beginning that keep a plain MLP (DeepSeek).")
    every: Layers = Field(
        1, description="After the first dense ones, each so many-th layer has experts; 2 is every other one (GShard)."
    )
    gate: GateName = Field(
        "softmax",
        description="Who chooses: the softmax's largest; switch: the one largest; gshard: the largest, and the second "
        "at random by its weight; sigmoid: the largest of scores that add up to nothing, plus a bias; biased-softmax: "
        "the softmax's largest, plus a bias; expert-choice: each expert its tokens; correlation: later choices among "
        "experts often chosen with the first.",
    )
    router_bias: bool = Field(False, description="The gate's logits have biases, which are trained (gpt-oss).")
    weigh: Literal["output", "input"] = Field(
        "output",
        description="The weight of a choice multiplies what the expert gives, or what it takes (Llama 4).",
    )
    normalise: bool = Field(
        True, description="softmaxes, sigmoid and correlation: the weights of a token's choices add up to one."
    )
    softmax_over: Literal["all", "chosen"] = Field(
        "all",
        description="softmax: weights are the softmax over all experts, or over the chosen ones' alone (Mixtral).",
    )
    routed_scaling: Positive = Field(
        1.0, description="What the weights of the chosen experts are multiplied with in the end."
    )
    num_groups: Experts = Field(
        1, description="softmaxes and sigmoid: equal groups of experts, of which a token uses some, such as nodes."
    )
    groups_kept: Experts = Field(1, description="Groups that a token's experts may lie in.")
    group_score: Literal["top2", "max"] = Field(
        "top2",
        description="How groups are compared: by the sum of their two best experts (DeepSeek-V3) or by the best "
        "(DeepSeek-V2).",
    )
    partners: ExpertsOr0 = Field(
        0, description="correlation: experts that later choices may fall on; 0 means half of all, at least top_k - 1."
    )
    co_activation_decay: Probability = Field(
        0.9, description="correlation: what remains after each step of the counts of experts chosen together."
    )
    bias_update: PositiveOr0 = Field(
        0.0,
        description="sigmoid and biased-softmax: by how much the bias of an expert that got less than the mean in a "
        "step rises, and that of one that got more falls (Wang et al. 2024, arXiv 2408.15664).",
    )
    aux_loss: AuxLoss = Field(
        "none", description="A loss that is least where experts are evenly used, of Switch or of GShard."
    )
    aux_coefficient: Positive = Field(
        0.01,
        description="Weight of aux_loss in the total loss. GShard's loss is smaller than Switch's by the square of the "
        "number of experts, and its coefficient must be as much larger to weigh the same.",
    )
    aux_scope: Scope = Field(
        "microbatch",
        description="Where use should be even: in each microbatch, in each sequence, or in the global batch (there "
        "the counts are those of the step before).",
    )
    z_coefficient: PositiveOr0 = Field(
        0.0, description="Of a loss that keeps the gate's logits small (Zoph et al. 2022, arXiv 2202.08906)."
    )
    capacity_factor: PositiveOr0 = Field(
        0.0,
        description="Most tokens of an expert in a microbatch, as a multiple of the mean; 0 means no limit, and with "
        "expert-choice 0 means 1: each expert takes exactly so many there.",
    )
    overflow: Overflow = Field(
        "drop-position",
        description="Rule for choices beyond an expert's capacity. drop-position drops the last, where first choices "
        "come before second ones, each in the order of tokens; drop-probability drops those of the smallest weights; "
        "reroute sends them to the token's next best expert that has room.",
    )

    @property
    def gate_facts(self) -> GateFacts:
        """The facts of the gate."""
        return GATES[self.gate]

    @property
    def routing(self) -> Routing:
        """The evenness of tokens over experts in training, as predictions take it.

        A model without a rule is taken to be as even as one with a loss of balance: whoever made it had one, or its
        gate would send nearly all tokens to the same experts.
        """
        if self.gate_facts.sees_all:
            return "forced"
        return "biased" if self.bias_update else "balanced"

    @property
    def num_chosen(self) -> int:
        """Experts per token with the default filled in; the average if experts choose tokens."""
        return self.top_k or self.gate_facts.top_k

    @property
    def num_partners(self) -> int:
        """Experts from which the correlation gate takes a token's later choices, with the default filled in: those that
        tokens choose most often together with its first expert."""
        return self.partners or max(self.num_chosen - 1, self.experts // 2)

    def has_experts(self, layer: int) -> bool:
        """True if a layer, counted from 0 in the whole model, has experts."""
        return self.experts > 0 and is_routed(layer, self.first_dense, self.every)

    def layers_with_experts(self, layers: int) -> list[int]:
        """The layers that have experts, in a model of `layers` layers."""
        return [layer for layer in range(layers) if self.has_experts(layer)]

    def ffn_size(self, dense: int) -> int:
        """Width inside an expert, if the model's MLP has width `dense`."""
        return self.ffn or dense

    def shared_size(self, dense: int) -> int:
        """Total width inside the shared experts."""
        return self.shared_experts * (self.shared_ffn or self.ffn_size(dense))

    def capacity(self, tokens: int) -> int | None:
        """Most tokens per expert in a microbatch of `tokens`; None if there is no limit."""
        factor = self.capacity_factor or (1.0 if self.gate_facts.sees_all else 0.0)
        if not factor:
            return None
        return min(tokens, max(1, math.ceil(tokens * self.num_chosen * factor / self.experts)))

    def faults(self, layers: int) -> list[str]:
        """Contradictions among the fields of the section, for a model of `layers` layers."""
        if not self.experts:
            names = [f"model.moe.{name}" for name in MoeSpec.model_fields if self._is_set(name)]
            if len(names) == 1:
                return [
                    say(
                        "{fields} is set, and model.moe.experts is 0; say how many experts, or leave it out",
                        fields=names[0],
                    )
                ]
            if names:
                return [
                    say(
                        "{fields} are set, and model.moe.experts is 0; say how many experts, or leave it out",
                        fields=tuple(names),
                    )
                ]
            return []
        return [*self._choice_faults(), *self._group_faults(), *self._layer_faults(layers), *self._balance_faults()]

    def _is_set(self, name: str) -> bool:
        return bool(getattr(self, name) != MoeSpec.model_fields[name].default)

    def _only_for(self, names: str, condition: bool, reason: str) -> list[str]:
        """Faults of fields that are set although the condition for them does not hold."""
        if condition:
            return []
        names_set: list[Any] = [name for name in names.split() if self._is_set(name)]
        return [
            say(
                "model.moe.{name} is {value}, and {reason}; leave it out, or set it to {default}",
                name=name,
                value=getattr(self, name),
                reason=reason,
                default=json.dumps(MoeSpec.model_fields[name].default),
            )
            for name in names_set
        ]

    def _choice_faults(self) -> list[str]:
        chosen, facts, faults = self.num_chosen, self.gate_facts, list[str]()
        if chosen > self.experts:
            faults.append(
                say(
                    "model.moe.top_k {chosen} is more than model.moe.experts {experts}; use at most {experts}",
                    chosen=chosen,
                    experts=self.experts,
                )
            )
        if facts.only_top_k and chosen != facts.top_k:
            faults.append(
                say(
                    "the {name} gate chooses {top_k} of the experts, and model.moe.top_k is {chosen}; leave it out",
                    name=facts.name,
                    top_k=facts.top_k,
                    chosen=chosen,
                )
            )
        if facts.counts_pairs and not chosen - 1 <= self.num_partners < self.experts:
            faults.append(
                say(
                    "model.moe.partners {num_partners} should be at least top_k - 1 = {least}, so that a token finds "
                    "enough, and less than experts {experts}",
                    num_partners=self.num_partners,
                    least=chosen - 1,
                    experts=self.experts,
                )
            )
        if chosen < facts.least_top_k:
            faults.append(
                say(
                    "the {name} gate limits choices after the first; use model.moe.top_k = {least_top_k}, or "
                    '"{instead}"',
                    name=facts.name,
                    least_top_k=facts.least_top_k,
                    instead=facts.instead,
                )
            )
        unread = " ".join(name for name in optional_reads() if name not in facts.reads and name != "num_groups")
        faults += self._only_for(unread, False, say('model.moe.gate = "{name}" knows nothing of it', name=facts.name))
        if self.softmax_over == "chosen" and not self.normalise:
            faults.append(
                say(
                    'model.moe.softmax_over = "chosen" makes weights that add up to one, and model.moe.normalise '
                    'is false; set normalise = true, or softmax_over = "all"'
                )
            )
        return faults

    def _group_faults(self) -> list[str]:
        reason = say('model.moe.gate = "{gate}" does not limit groups', gate=self.gate)
        faults = self._only_for("num_groups", "num_groups" in self.gate_facts.reads, reason)
        faults += self._only_for("groups_kept group_score", self.num_groups > 1, say("model.moe.num_groups is 1"))
        if faults or self.num_groups == 1:
            return faults
        if self.experts % self.num_groups:
            return [
                say(
                    "model.moe.num_groups {num_groups} does not divide {experts} experts ({experts} / {num_groups} = "
                    "{quotient:.2f}); use a divisor of {experts}",
                    num_groups=self.num_groups,
                    experts=self.experts,
                    quotient=self.experts / self.num_groups,
                )
            ]
        size = self.experts // self.num_groups
        if self.groups_kept > self.num_groups:
            faults.append(
                say(
                    "model.moe.groups_kept {groups_kept} is more than num_groups {num_groups}; use less",
                    groups_kept=self.groups_kept,
                    num_groups=self.num_groups,
                )
            )
        elif self.groups_kept * size < self.num_chosen:
            needed = -(-self.num_chosen // size)
            way_out = (
                say("keep at least {needed} groups", needed=needed)
                if needed <= self.num_groups
                else say("use a smaller model.moe.top_k")
            )
            faults.append(
                say(
                    "model.moe.groups_kept {groups_kept} x {size} experts of a group = {held} is less than top_k "
                    "{num_chosen}; {way_out}",
                    groups_kept=self.groups_kept,
                    size=size,
                    held=self.groups_kept * size,
                    num_chosen=self.num_chosen,
                    way_out=way_out,
                )
            )
        if self.group_score == "top2" and size < 2:
            faults.append(
                say('model.moe.group_score = "top2" needs two experts in a group, and there is one; use "max"')
            )
        return faults

    def _layer_faults(self, layers: int) -> list[str]:
        faults = self._only_for("shared_ffn shared_gate", self.shared_experts > 0, say("model.moe.shared_experts is 0"))
        if not self.layers_with_experts(layers):
            faults.append(
                say(
                    "model.moe.first_dense {first_dense} and every {every} leave none of {layers} layers with "
                    "experts; use first_dense + every of at most {layers}",
                    first_dense=self.first_dense,
                    every=self.every,
                    layers=layers,
                )
            )
        return faults

    def _balance_faults(self) -> list[str]:
        faults = self._only_for(
            "aux_coefficient aux_scope", self.aux_loss != "none", say('model.moe.aux_loss is "none"')
        )
        limited = self.capacity_factor > 0 and not self.gate_facts.sees_all
        reason = (
            say("each expert takes as many as it has room for")
            if self.gate_facts.sees_all
            else say("model.moe.capacity_factor is 0, so nothing overflows")
        )
        faults += self._only_for("overflow", limited, reason)
        if self.gate_facts.sees_all and self.aux_loss != "none":
            faults.append(
                say(
                    'model.moe.aux_loss = "{aux_loss}" evens out what is even: with the {gate} gate all experts '
                    'take the same number of tokens; use "none"',
                    aux_loss=self.aux_loss,
                    gate=self.gate,
                )
            )
        return faults
