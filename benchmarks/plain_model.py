"""The decoder as a user of torch writes it: torch.nn modules, batch first, nothing of ours.

A baseline should be fast, so each choice is the fastest of those tried on a CPU: query, key and value are
one product, gate and up are one, and rotary positions are a multiplication of complex numbers, as in Meta's own Llama,
which costs a fifth of the usual concatenation of halves. That needs the elements of a pair side by side: the rows of
the query and key matrices are put in that order when our weights are copied, and the model is the same.
A compiler knows no complex numbers: where the model is to be compiled, the same is written with real ones.

Shape suffixes: B batch, S sequence, H hidden, N heads, D head width, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.config.model import ModelSpec


class PlainAttention(nn.Module):
    """Causal self-attention."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.heads, self.head_dim = spec.heads, spec.head_size
        self.qkv = nn.Linear(spec.hidden, 3 * spec.heads * spec.head_size, bias=False)
        self.out = nn.Linear(spec.heads * spec.head_size, spec.hidden, bias=False)

    def forward(self, x_BSH: Tensor, turns_SND: Tensor) -> Tensor:
        """[B, S, H] to [B, S, H]."""
        B, S, _ = x_BSH.shape
        q, k, v = self.qkv(x_BSH).view(B, S, 3, self.heads, self.head_dim).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (rotated(q, turns_SND), rotated(k, turns_SND), v))
        out_BNSD = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out_BNSD.transpose(1, 2).reshape(B, S, -1))


def rotated(x_BSND: Tensor, turns_SND: Tensor) -> Tensor:
    """Turn each pair of neighbours by its angle, given as complex numbers or as [..., (cosine, sine)]."""
    if not turns_SND.is_complex():
        (first, second), (cosine, sine) = x_BSND.unflatten(-1, (-1, 2)).unbind(-1), turns_SND.unbind(-1)
        return torch.stack((first * cosine - second * sine, second * cosine + first * sine), dim=-1).flatten(-2)
    pairs = torch.view_as_complex(x_BSND.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns_SND).flatten(-2)


class PlainMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_up = nn.Linear(spec.hidden, 2 * spec.ffn_size, bias=False)
        self.down = nn.Linear(spec.ffn_size, spec.hidden, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """[B, S, H] to [B, S, H]."""
        gate, up = self.gate_up(x_BSH).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class PlainBlock(nn.Module):
    """The pre-norm block."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(spec.hidden, eps=spec.norm_epsilon)
        self.attention = PlainAttention(spec)
        self.mlp_norm = nn.RMSNorm(spec.hidden, eps=spec.norm_epsilon)
        self.mlp = PlainMLP(spec)

    def forward(self, x_BSH: Tensor, turns_SND: Tensor) -> Tensor:
        """[B, S, H] to [B, S, H]."""
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH), turns_SND)
        return x_BSH + self.mlp(self.mlp_norm(x_BSH))


class PlainDecoder(nn.Module):
    """Tokens to the mean loss; the loss is inside, for DistributedDataParallel reduces what `forward` used."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.num_kv_heads == spec.heads and spec.gated_mlp and not spec.tied_embeddings and not spec.bias
        self.embedding = nn.Embedding(spec.vocab, spec.hidden)
        self.layers = nn.ModuleList(PlainBlock(spec) for _ in range(spec.layers))
        self.norm = nn.RMSNorm(spec.hidden, eps=spec.norm_epsilon)
        self.head = nn.Linear(spec.hidden, spec.vocab, bias=False)
        exponents = torch.arange(0, spec.head_size, 2) / spec.head_size
        angles = torch.arange(spec.sequence)[:, None] * (1.0 / spec.rotary_base**exponents)
        turns = torch.polar(torch.ones_like(angles), angles)[:, None, :]
        self.register_buffer("turns_SND", turns, persistent=False)

    def compile_layers(self) -> None:
        """Have torch.compile make the layers faster: one is compiled, and all use it."""
        self.turns_SND = torch.view_as_real(self.turns_SND)
        for layer in self.layers:
            layer.compile()

    def logits(self, tokens_BS: Tensor) -> Tensor:
        """[B, S] to [B, S, V]."""
        x_BSH = self.embedding(tokens_BS)
        for layer in self.layers:
            x_BSH = layer(x_BSH, self.turns_SND)
        return self.head(self.norm(x_BSH))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """The mean loss of tokens [B, S + 1]."""
        logits_BSV = self.logits(tokens_BS[:, :-1])
        return functional.cross_entropy(logits_BSV.flatten(0, 1), tokens_BS[:, 1:].flatten())


def plain_decoder(spec: ModelSpec, weights: dict[str, Tensor] | None) -> PlainDecoder:
    """The model with given weights, or with random ones of the usual size."""
    model = PlainDecoder(spec)
    assert weights is None or weights.keys() == dict(model.named_parameters()).keys()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if weights is not None:
                parameter.copy_(weights[name])
            elif parameter.dim() > 1:
                parameter.normal_(std=spec.init_std)
    return model


def by_plain_names(spec: ModelSpec, ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our weights of a whole model under the names, shapes and order of rows of the plain one."""
    result = {}
    for name, tensor in ours.items():
        if name.endswith("qkv.weight"):  # ours: [heads, (query, key, value), D, H]
            turned, value = tensor.split((2, 1), dim=1)
            halves = turned.unflatten(2, (2, -1))
            turned = halves.transpose(2, 3).flatten(2, 3)  # from halves to neighbours
            tensor = torch.cat((turned, value), dim=1).transpose(0, 1).flatten(0, 2)
        elif name.endswith("mlp.up.weight"):  # ours: [(gate, up), F, H]
            name, tensor = name.replace("up.weight", "gate_up.weight"), tensor.flatten(0, 1)
        result[name] = tensor
    return result
