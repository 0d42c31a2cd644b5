"""Models whose folders bring their own code, beside a model of transformers' that computes the same.

A case says how the tensors of transformers' model are named and fused in the released files, both ways.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

_QUERY_KEY_VALUE = re.compile(r"(.*\.self_attn)\.[qkv]_proj\.(weight|bias)")


@dataclass(frozen=True)
class OwnCodeModel:
    """A released model: `family` and `keys` of its config.json; `like` and `like_keys` of transformers' model.

    Parts of names are `renamed`, first to second. Query, key and value are one matrix of the name `fused_name`: one
    behind the other, or by key/value head. `each_expert` is True if files have a tensor for each matrix of an expert.
    """

    family: str
    keys: Mapping[str, Any]
    like: str
    like_keys: Mapping[str, Any]
    renamed: tuple[tuple[str, str], ...] = ()
    fused: Literal["no", "stacked", "grouped"] = "no"
    fused_name: str = ""
    each_expert: bool = False

    def reference(self) -> Any:
        """Transformers' model, with random values of its own initialisation."""
        from transformers import AutoModelForCausalLM
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        names = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        config = CONFIG_MAPPING[self.like](**(names | dict(self.like_keys)))
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        if self.each_expert:
            self._put_experts(model)
        return model

    def released(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of transformers' model as the released files have them."""
        files, joined = dict[str, Tensor](), dict[str, list[Tensor]]()
        for name, tensor in tensors.items():
            match = _QUERY_KEY_VALUE.fullmatch(name)
            if match and self.fused != "no":
                joined.setdefault(f"{match[1]}.{self.fused_name}.{match[2]}", []).append(tensor)
            elif self.each_expert and ".experts." in name:
                files |= _apart(name, tensor)
            else:
                files[self._renamed(name)] = tensor
        return files | {self._renamed(name): self._joined(parts) for name, parts in joined.items()}

    def own(self, files: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the released files as transformers' model has them."""
        tensors, experts = dict[str, Tensor](), dict[str, dict[int, dict[str, Tensor]]]()
        for name, tensor in files.items():
            plain = self._renamed(name, back=True)
            match = re.fullmatch(rf"(.*)\.{self.fused_name}\.(weight|bias)", plain) if self.fused != "no" else None
            expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", plain)
            if match:
                for which, part in zip("qkv", self._parts(tensor), strict=True):
                    tensors[f"{match[1]}.{which}_proj.{match[2]}"] = part
            elif expert:
                experts.setdefault(expert[1], {}).setdefault(int(expert[2]), {})[expert[3]] = tensor
            else:
                tensors[plain] = tensor
        for name, matrices in experts.items():
            ordered = [matrices[number] for number in sorted(matrices)]
            tensors[f"{name}.gate_up_proj"] = torch.stack([torch.cat((m["gate_proj"], m["up_proj"])) for m in ordered])
            tensors[f"{name}.down_proj"] = torch.stack([m["down_proj"] for m in ordered])
        return tensors

    def _put_experts(self, model: Any) -> None:
        """Give Llama's layers, all but the first, the experts of DeepSeek-V2."""
        from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config
        from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

        config = DeepseekV2Config(**(dict(self.keys) | {"topk_method": "greedy"}))
        config._experts_implementation = "eager"
        for layer in model.model.layers[1:]:
            layer.mlp = DeepseekV2Moe(config)

    def _renamed(self, name: str, back: bool = False) -> str:
        for first, second in reversed(self.renamed) if back else self.renamed:
            name = name.replace(second, first) if back else name.replace(first, second)
        return name

    @property
    def _heads(self) -> tuple[int, int, int]:
        """(query heads, key/value heads, width of a head) of transformers' model."""
        heads, width = self.like_keys["num_attention_heads"], self.like_keys.get("head_dim")
        return heads, self.like_keys["num_key_value_heads"], width or self.like_keys["hidden_size"] // heads

    def _joined(self, parts: list[Tensor]) -> Tensor:
        if self.fused == "stacked":
            return torch.cat(parts)
        groups = self._heads[1]
        return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)

    def _parts(self, tensor: Tensor) -> tuple[Tensor, ...]:
        heads, groups, width = self._heads
        if self.fused == "stacked":
            return tensor.split((heads * width, groups * width, groups * width))
        parts = tensor.unflatten(0, (groups, -1)).split((heads // groups * width, width, width), dim=1)
        return tuple(part.flatten(0, 1) for part in parts)


def _apart(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor of all experts as a tensor for each matrix of one."""
    start, _, which = name.rpartition(".")
    halves = {"gate_proj": 0, "up_proj": 1} if which == "gate_up_proj" else {"down_proj": 0}
    return {
        f"{start}.{expert}.{part}.weight": matrices.chunk(len(halves))[place].contiguous()
        for expert, matrices in enumerate(tensor)
        for part, place in halves.items()
    }
