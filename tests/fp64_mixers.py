"""Recurrent mixers in FP64, token by token, from their papers and the documentation of their sizes.

x is one document [S, D]; `weights` are the model's by name, in FP64, and `name` is the prefix of the mixer's.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from te_models.config.model import ModelConfig

Weights = Mapping[str, Tensor]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: x.relu() ** 2,
}
LENGTH_EPSILON = 1e-6  # added to the squared lengths of queries and keys


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    out = x @ weights[f"{name}.weight"].T
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def convolved(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Return each channel of x [S, C] with its newest tokens, weighed by the taps, the last of which is the token's."""
    taps = weights[f"{name}.weight"][:, 0]  # [C, K]
    size = taps.shape[1]
    out = []
    for place in range(len(x)):
        first = max(0, place + 1 - size)
        seen = x[first : place + 1]
        out.append((seen * taps[:, size - len(seen) :].T).sum(0))
    mixed = torch.stack(out)
    return mixed + weights[f"{name}.bias"] if f"{name}.bias" in weights else mixed


def rms(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + LENGTH_EPSILON).sqrt()


def short_convolution(config: ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    """out_proj(c * conv(b * x))."""
    b, c, x = linear(weights, f"{name}in_proj", x).chunk(3, dim=1)
    return linear(weights, f"{name}out_proj", c * convolved(weights, f"{name}conv", b * x))


def mamba2(config: ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    """A state per head that decays by one number, S <- exp(dt a) S + dt x b^T, read as y = S c + d x."""
    sizes = config.mamba2
    assert sizes is not None
    heads, groups, inner = sizes.num_heads, sizes.num_groups, sizes.num_heads * sizes.head_dim
    group = groups * sizes.state_dim
    rows = linear(weights, f"{name}zxbcdt_proj", x)[:, : 2 * inner + 2 * group + heads]
    parts = list(rows.split([inner, inner, group, group, heads], dim=1))
    for number, factor in enumerate(sizes.multipliers or ()):
        parts[number] = parts[number] * factor
    z, x, b, c, dt = parts
    mixed = ACTIVATIONS[sizes.activation](
        convolved(weights, f"{name}conv1d", torch.cat((x, b, c), 1))
    )
    x, b, c = mixed.split([inner, group, group], dim=1)
    dt = F.softplus(dt + weights[f"{name}dt_bias"])
    dt = dt.clamp(sizes.time_step_min or 0.0, sizes.time_step_max or float("inf"))
    rate = -weights[f"{name}A_log"].exp()
    outputs = []
    states: list[Tensor] = [x.new_zeros(sizes.head_dim, sizes.state_dim)] * heads
    for place in range(len(x)):
        own = x[place].reshape(heads, -1)
        of_groups = (t[place].reshape(groups, -1) for t in (b, c))
        into, out = (t.repeat_interleave(heads // groups, dim=0) for t in of_groups)
        row = []
        for head in range(heads):
            step = dt[place, head]
            new = step * own[head][:, None] * into[head]
            states[head] = (step * rate[head]).exp() * states[head] + new
            row.append(states[head] @ out[head] + weights[f"{name}D"][head] * own[head])
        outputs.append(torch.cat(row))
    y = torch.stack(outputs)
    if sizes.norm == "gated":
        y = y * F.silu(z)
    if sizes.norm != "none":
        y = rms(y.reshape(len(y), groups, -1), config.rms_norm_eps).flatten(1)
        y = y * weights[f"{name}norm.weight"]
    if sizes.norm != "gated":
        y = y * F.silu(z)
    return linear(weights, f"{name}out_proj", y)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Return the outputs [S, n, V] of q, k [S, n, K], v [S, n, V], the decay of each key [S, n, K] and beta [S, n]."""
    q = unit(q) * q.shape[2] ** -0.5
    k = unit(k)
    outputs = []
    states: list[Tensor] = [v.new_zeros(k.shape[2], v.shape[2])] * k.shape[1]
    for place in range(len(q)):
        row = []
        for head in range(k.shape[1]):
            key = k[place, head]
            kept = decay[place, head][:, None] * states[head]
            error = v[place, head] - key @ kept
            states[head] = kept + beta[place, head] * key[:, None] * error
            row.append(q[place, head] @ states[head])
        outputs.append(torch.stack(row))
    return torch.stack(outputs)


def deltanet(config: ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    """Gated DeltaNet: a decay per head, and a norm of each head before the gate silu(z)."""
    sizes = config.linear_attention
    assert sizes is not None
    heads = sizes.num_value_heads
    keys, values = sizes.num_key_heads * sizes.key_head_dim, heads * sizes.value_head_dim
    rows = linear(weights, f"{name}qkvz_proj", x)
    mixed, z = rows.split([2 * keys + values, values], dim=1)
    b, a = linear(weights, f"{name}ba_proj", x).split([heads, heads], dim=1)
    mixed = ACTIVATIONS[config.hidden_act](convolved(weights, f"{name}conv1d", mixed))
    q, k, v = mixed.split([keys, keys, values], dim=1)
    each = heads // sizes.num_key_heads
    q, k = (t.reshape(len(x), sizes.num_key_heads, -1) for t in (q, k))
    q, k = (t.repeat_interleave(each, dim=1) for t in (q, k))
    rate = weights[f"{name}A_log"].exp()
    decay = (-rate * F.softplus(a + weights[f"{name}dt_bias"])).exp()
    decay = decay[..., None].expand_as(k)
    out = delta_rule(q, k, v.reshape(len(x), heads, -1), decay, b.sigmoid())
    out = rms(out, config.rms_norm_eps) * weights[f"{name}norm.weight"]
    return linear(weights, f"{name}out_proj", out.flatten(1) * F.silu(z))


def kimi_delta(config: ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    """Kimi Delta Attention: a decay per channel of the keys, and a norm of each head before the gate sigmoid(g)."""
    sizes = config.kda
    assert sizes is not None
    heads, inner = sizes.num_heads, sizes.num_heads * sizes.head_dim
    rank = sizes.gate_rank or inner
    mixed, g = linear(weights, f"{name}qkvg_proj", x).split([3 * inner, rank], dim=1)
    gates = linear(weights, f"{name}fb_proj", x)
    f, b = gates[:, :rank], gates[:, rank : rank + heads]
    if sizes.gate_rank:
        f = linear(weights, f"{name}f_up_proj", f)
        g = linear(weights, f"{name}g_up_proj", g)
    mixed = ACTIVATIONS[config.hidden_act](convolved(weights, f"{name}conv1d", mixed))
    q, k, v = (t.reshape(len(x), heads, -1) for t in mixed.split([inner] * 3, dim=1))
    rate = weights[f"{name}A_log"].exp()[:, None]
    f = (f + weights[f"{name}dt_bias"]).reshape(len(x), heads, -1)
    if sizes.decay_bound is None:
        logarithm = -rate * F.softplus(f)
    else:
        logarithm = -sizes.decay_bound * (rate * f).sigmoid()
    out = delta_rule(q, k, v, logarithm.exp(), b.sigmoid())
    out = rms(out, config.rms_norm_eps) * weights[f"{name}o_norm.weight"]
    return linear(weights, f"{name}o_proj", out.flatten(1) * g.sigmoid())


# Kind of layer -> the name of its module, and its function.
RECURRENT = {
    "conv": ("conv", short_convolution),
    "mamba2": ("mamba", mamba2),
    "linear_attention": ("linear_attn", deltanet),
    "kda": ("kda", kimi_delta),
}
