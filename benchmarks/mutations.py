"""Plant mistakes in a copy of the project, one at a time, and say which of them the nearest tests do not find.

    python benchmarks/mutations.py [--only WORD ...] [--list]

Each mutation replaces a piece of text that a file has exactly once. Tests of files near it run in a forked process that
has imported PyTorch already; a mutation lives if all of them pass. The same tests run once without a mistake, since
those that fail anyway, or of which none was found, kill nothing. It runs on one CPU core; --list takes seconds and
says which texts do not match. Exit status 1: a mutation lives, or its text is not in the file (any more).
"""

import argparse
import compileall
import contextlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("te_models", "tests", "benchmarks", "recipes", "examples", "docs", "pyproject.toml")


class Mutation(NamedTuple):
    """`old` in a file of te_models becomes `new`, and with it those of `also`."""

    old: str
    new: str
    also: tuple[tuple[str, str], ...] = ()

    def planted(self, text: str) -> str | None:
        """Return the text with the mistake; None if it is not what the mutation expects."""
        for old, new in ((self.old, self.new), *self.also):
            if text.count(old) != 1:
                return None
            text = text.replace(old, new)
        return text


ROUTER = {
    "groups are judged by one expert": Mutation(
        "groups.topk(moe.group_scores, dim=2)", "groups.topk(1, dim=2)"
    ),
    "groups are judged by one expert more": Mutation(
        "groups.topk(moe.group_scores, dim=2)",
        "groups.topk(min(moe.group_scores + 1, groups.shape[2]), dim=2)",
    ),
    "of equal groups the last": Mutation(
        """            .sort(dim=1, descending=True, stable=True)
            .indices
        )""",
        """            .flip(1)
            .sort(dim=1, descending=True, stable=True)
            .indices
        )
        best = moe.n_group - 1 - best""",
    ),
    "one group more": Mutation("best[:, : moe.topk_group]", "best[:, : moe.topk_group + 1]"),
    "experts of other groups have a score of zero": Mutation(
        "masked_fill(~allowed[..., None], -torch.inf)", "masked_fill(~allowed[..., None], 0.0)"
    ),
    "of equal experts the last": Mutation(
        "chosen = scores.sort(dim=1, descending=True, stable=True).indices[:, : moe.num_experts_per_tok]",
        "chosen = scores.shape[1] - 1 - scores.flip(1).sort(dim=1, descending=True, stable=True).indices[\n"
        "        :, : moe.num_experts_per_tok\n    ]",
    ),
    "the bias is left out of the choice": Mutation(
        "scores = scores + bias.detach()", "scores = scores"
    ),
    "padding chooses experts": Mutation(
        "return chosen if real is None else chosen.masked_fill(~real, logits.shape[1])",
        "return chosen",
    ),
    "a large epsilon of sigmoid": Mutation("epsilon = 1e-20", "epsilon = 1e-4"),
    "no epsilon of sigmoid": Mutation("epsilon = 1e-20", "epsilon = 0.0"),
    "an epsilon of softmax": Mutation(
        "total if epsilon is None else total + epsilon", "total + (epsilon or 1e-4)"
    ),
    "an index that is not clamped": Mutation("chosen.clamp(max=logits.shape[1] - 1)", "chosen"),
    "weights never sum to one": Mutation("    if moe.norm_topk_prob:\n", "    if False:\n"),
    "weights always sum to one": Mutation("    if moe.norm_topk_prob:\n", "    if True:\n"),
    "no factor on weights": Mutation("scores * moe.routed_scaling_factor", "scores"),
    "balance counts the biased choice": Mutation(
        "if moe.expert_bias or moe.n_group > 1:\n        # Without",
        "if moe.n_group > 1:\n        # Without",
    ),
    "balance counts the choice among groups": Mutation(
        "if moe.expert_bias or moe.n_group > 1:\n        # Without",
        "if moe.expert_bias:\n        # Without",
    ),
    "padding has probabilities": Mutation("probabilities = probabilities * real", "pass"),
    "padding has a z-loss": Mutation("squares = squares * real", "pass"),
    "padding counts as tokens": Mutation("tokens = real.sum().float()", "pass"),
    "padding counts among the best": Mutation(
        "each = real.to(counts).expand_as(named)",
        "each = torch.ones_like(named, dtype=counts.dtype)",
    ),
    "shares are those without bias": Mutation("shares = went /", "shares = best /"),
    "the z-loss is a sum over layers": Mutation(
        "squares.sum() / total, shares", "squares.sum() / total * len(layers), shares"
    ),
    "rows of experts are one too few": Mutation(
        "(counts + alignment - 1) // alignment * alignment", "counts // alignment * alignment"
    ),
}
AMONG = {
    "other processes are not asked": Mutation(
        "reduced_amax if scaling.built.reduce_amax else amax", "amax"
    ),
    "each process by itself without reduce_amax": Mutation(
        "reduced_amax if scaling.built.reduce_amax else amax", "reduced_amax"
    ),
}
TOGETHER = {
    "other processes count for nothing": Mutation(
        "dist.all_reduce(everywhere, group=group)", "pass"
    ),
}
MOE = {
    "the shared expert has no jitter": Mutation(
        "x = routed = shared_input = self._jittered(x)", "x = routed = self._jittered(x)"
    ),
    "jitter in evaluation": Mutation("if self.jitters and self.training:", "if self.jitters:"),
    "jitter has one side": Mutation("uniform_(1 - noise, 1 + noise)", "uniform_(1.0, 1 + noise)"),
    "padding of rows gets the bias": Mutation(
        "return out if real is None else out * real", "return out"
    ),
    "padding of rows is real": Mutation(
        "(local_places.token < len(local_places.row))[:, None] if self._pads",
        "(local_places.token <= len(local_places.row))[:, None] if self._pads",
    ),
    "the shared expert's gate is left out": Mutation(
        "shared_out if gate is None else shared_out * gate", "shared_out"
    ),
    "the shared expert's gate is linear": Mutation(
        "torch.sigmoid(context.linear(", "(context.linear("
    ),
    "the router's bias is left out": Mutation(
        'bias = linear.get_parameter("bias").float() if linear.use_bias else None', "bias = None"
    ),
    "the router rounds to BF16": Mutation(
        "        if self.spec.experts.router_fp32:\n", "        if False:\n"
    ),
    "a recompute describes the layer twice": Mutation("        if first:\n", "        if True:\n"),
    "padding is routed": Mutation(
        "choose(logits, bias, context.routed, moe, kernels)",
        "choose(logits, bias, None, moe, kernels)",
    ),
}
CONTEXT = {
    "padding of packs reaches experts": Mutation(
        "return documents.reshape(-1, 1) >= 0", "return real"
    ),
    "the first document reaches no expert": Mutation(
        "documents.reshape(-1, 1) >= 0", "documents.reshape(-1, 1) > 0"
    ),
    "angles of the longest document": Mutation(
        "rotary_tables(rope, positions, dtype, documents)",
        "rotary_tables(rope, positions, dtype)",
    ),
}
INPUTS = {
    "positions count across documents": Mutation(
        "return place - torch.where(first, place, 0).cummax(dim=1).values",
        "return place.expand(len(documents), -1)",
    ),
}
ELEMENTWISE = {
    "the gate's edge has no slope": Mutation(
        "inside = gate_half <= limit,", "inside = gate_half < limit,"
    ),
    "the edge of up has no slope": Mutation(
        "inside = gate_half <= limit, up.abs() <= limit",
        "inside = gate_half <= limit, up.abs() < limit",
    ),
    "the gate is clamped below": Mutation(
        "    gate_half = gate_half.clamp(max=limit)\n    up = up.clamp(-limit, limit)\n    return",
        "    gate_half = gate_half.clamp(-limit, limit)\n    up = up.clamp(-limit, limit)\n    return",
    ),
    "up is not clamped below": Mutation(
        "    up = up.clamp(-limit, limit)\n    return", "    up = up.clamp(max=limit)\n    return"
    ),
    "the slope of the sigmoid lacks alpha": Mutation(
        "(1 + alpha * gate_half *", "(1 + gate_half *"
    ),
    "clamped SwiGLU in BF16": Mutation(
        "gate_half, up = gate_up.float().chunk(2, dim=-1)\n    gate_half = gate_half.clamp(max=limit)\n"
        "    up = up.clamp(-limit, limit)\n    return",
        "gate_half, up = gate_up.chunk(2, dim=-1)\n    gate_half = gate_half.clamp(max=limit)\n"
        "    up = up.clamp(-limit, limit)\n    return",
    ),
    "a convolution reads other documents": Mutation(
        "if documents is not None and back:", "if False:"
    ),
    "a convolution in BF16": Mutation(
        "total + earlier * taps[:, 0, size - 1 - back].float()",
        "(total + earlier * taps[:, 0, size - 1 - back].float()).to(x.dtype)",
    ),
    "padding decays a state": Mutation("(g * real[..., None], beta", "(g, beta"),
    "padding writes into a state": Mutation("beta * real[..., None])", "beta)"),
    "a cap before the divisor": Mutation(
        "torch.tanh(logits / cap) * cap", "torch.tanh(logits) * cap"
    ),
    "a loss without targets is NaN": Mutation(
        "return total / (targets != -100).sum().clamp(min=1)",
        "return total / (targets != -100).sum()",
    ),
    "a gate in BF16": Mutation(
        """    z = z.float()
    return (x.float() * F.silu(z if factor == 1 else z * factor)).to(x.dtype)""",
        "    return x * F.silu(z if factor == 1 else z * factor)",
    ),
    "a factor that is not rounded": Mutation(
        "return torch.tensor(factor, dtype=dtype).item()", "return factor"
    ),
}
HEAD = {
    "the slope of a cap is not squared": Mutation(
        "1 - (final.float() / cap).square_()", "1 - (final.float() / cap).abs_()"
    ),
    "a cap has no slope": Mutation(
        "slope = None if cap is None or not gradient", "slope = None if True"
    ),
    "the slope of a cap in BF16": Mutation(
        "1 - (final.float() / cap).square_()", "1 - (final / cap).square_()"
    ),
    "the gradient lacks the divisor": Mutation("change.div_(divisor)", "change"),
    "the weight's gradient is summed in BF16": Mutation(
        "torch.zeros(weight.shape, dtype=torch.float32, device",
        "torch.zeros(weight.shape, dtype=weight.dtype, device",
    ),
    "each chunk counts its own targets": Mutation(
        "kernel(logits, targets[part], count,",
        "kernel(logits, targets[part], (targets[part] != -100).sum().clamp(min=1),",
    ),
    "prompts have a gradient": Mutation("* (counted / count)[:, None])", "/ count)"),
    "prompts have a loss": Mutation("[:, 0] * counted).sum()", "[:, 0]).sum()"),
    "the loss's factor is rounded": Mutation(
        "factor = grad.float().reshape(1)", "factor = grad.to(slopes[0].dtype).reshape(1)"
    ),
    "a retained gradient is overwritten": Mutation(
        "if ctx.multiply is None or torch._C._autograd._get_current_graph_task_keep_graph():",
        "if ctx.multiply is None:",
    ),
    "logits in FP16's range": Mutation(
        "logs = torch.log_softmax(logits.float(), dim=-1)",
        "logs = torch.log_softmax(logits, dim=-1).float()",
    ),
}
CACHE = {
    "a state is read without a copy": Mutation("name: tensor.clone() for", "name: tensor for"),
    "a tail is read without a copy": Mutation(
        "name: tensor.clone() for", 'name: tensor if name == "tail" else tensor.clone() for'
    ),
    "a matrix is read without a copy": Mutation(
        "name: tensor.clone() for", 'name: tensor if name == "matrix" else tensor.clone() for'
    ),
    "a cleared tail stays": Mutation(
        "        for tensor in self.tensors.values():\n            tensor.zero_()\n",
        '        for name in self.tensors.keys() - {"tail"}:\n            self.tensors[name].zero_()\n',
    ),
    "a cleared matrix stays": Mutation(
        "        for tensor in self.tensors.values():\n            tensor.zero_()\n",
        '        for name in self.tensors.keys() - {"matrix"}:\n            self.tensors[name].zero_()\n',
    ),
    "keys and latents stay after a clear": Mutation("        self.keys.zero_()\n", ""),
    "values and rotated keys stay after a clear": Mutation("        self.values.zero_()\n", ""),
    "a window counts slots": Mutation(
        "seen = seen & within_window(queries, self.positions, window)",
        "seen = seen & (distance < window)",
    ),
    "padding counts as a position": Mutation("self.counts += new.sum(-1)", "self.counts += seq"),
}
SDPA = {
    "a window of one key more": Mutation(
        "> queries[:, None, :, None] - window", ">= queries[:, None, :, None] - window"
    ),
    "a padded window counts slots": Mutation(
        "        if real is None:\n            mask = mask & (distance < window)",
        "        if True:\n            mask = mask & (distance < window)",
    ),
}
CONVOLUTION = {
    "the tail is that of padding": Mutation(
        "        return whole[:, seq:]\n    place = counts",
        "        return whole[:, seq:]\n    place = 0 * counts + seq",
    ),
    "the tail begins a token late": Mutation(
        "place = counts[:, None] + torch.arange(",
        "place = counts[:, None] + 1 * (counts[:, None] > 0) - 1 + torch.arange(",
    ),
    "the slowest rate": Mutation("SLOWEST = 1e-3", "SLOWEST = 1e-2"),
    "A_log is not a logarithm": Mutation(
        "values.uniform_(1.0, 16.0).log_()", "values.uniform_(1.0, 16.0)"
    ),
}
DELTANET = {
    "a token more": Mutation(
        "device=counts.device) < counts[:, None]", "device=counts.device) <= counts[:, None]"
    ),
    "no state is written": Mutation(
        "            state.write(tail=newest", "            dict(tail=newest"
    ),
    "documents are one": Mutation(
        "delta_rule(q, k, v, g, beta, before, context.documents)",
        "delta_rule(q, k, v, g, beta, before, None)",
    ),
    "a convolution over documents": Mutation(
        "            context.documents,\n            sizes=",
        "            None,\n            sizes=",
    ),
    "z of the next token": Mutation(
        "gated_heads(self.norm, out, z, consumer",
        "gated_heads(self.norm, out, z.roll(-1, 0), consumer",
    ),
    "a norm with the model's epsilon shift": Mutation(
        "factory.norm(sizes.value_head_dim, zero_centered=False)",
        "factory.norm(sizes.value_head_dim)",
    ),
}
LATENT = {
    "padding is not zero": Mutation("out = out * context.real", "out = out"),
    "a bias of padding": Mutation(
        "return context.without_padding(out) if self.spec.output_bias else out", "return out"
    ),
    "plain channels are rotated": Mutation(
        "torch.cat((plain, context.rotated(turned, rope)), dim=-1)",
        "torch.cat((context.rotated(turned, rope), plain), dim=-1)",
    ),
    "keys by head and queries not": Mutation(
        "k_rope = context.rotated(k_rope, rope)", "k_rope = k_rope"
    ),
    "no norm of the latent": Mutation(
        'self.get_submodule("kv_a_layernorm")(first_rows(kv, count).contiguous())',
        "first_rows(kv, count).contiguous()",
    ),
    "no norm of the queries' latent": Mutation(
        'self.get_submodule("q_a_layernorm")(q.contiguous())', "q.contiguous()"
    ),
    "the scale of the padded width": Mutation(
        "scale = self.spec.multiplier", "scale = self.spec.sizes.width**-0.5"
    ),
}
GROUPED = {
    "an idle expert's weight is not quantized": Mutation(
        "            elif call.fp8 is not None:\n", "            elif False:\n"
    ),
    "an idle expert has no gradient": Mutation(
        "grad.new_zeros(ctx.weight_shape, dtype=call.dtype) if wgrad else None", "None"
    ),
    "an idle expert's bias has no gradient": Mutation(
        "db = grad.new_zeros(ctx.weight_shape[0]) if summed else None", "db = None"
    ),
    "backward scales stay": Mutation("    if updates is not None:\n", "    if False:\n"),
    "rows in 8s": Mutation("step = 16 if tracked", "step = 8 if tracked"),
    "no check of rows": Mutation(
        "            if self.fp8:\n                self._check_fp8(rows, tracked)\n", ""
    ),
    "two backwards": Mutation("    ctx.experts = None\n", "    pass\n"),
    "a frozen weight has a gradient": Mutation(
        "wgrad = grad and weights[0].requires_grad", "wgrad = grad"
    ),
}
PACKING = {
    "not the best fit": Mutation(
        "bisect.bisect_left(room, (length, -1))",
        "len(room) - 1 if room and room[-1][0] >= length else len(room)",
    ),
    "records of one token": Mutation(
        "starts[lengths > 1], lengths[lengths > 1]", "starts[lengths > 0], lengths[lengths > 0]"
    ),
    "records in the order of their length": Mutation(
        "for record in sorted(window)]", "for record in window]"
    ),
    "the first token of a document counts": Mutation(
        "np.where(counted & ~firsts, ids, IGNORED)", "np.where(counted, ids, IGNORED)"
    ),
    "padding is a document": Mutation(
        "np.where(flags & PADDING, PAD_DOCUMENT, np.cumsum(firsts, dtype=np.int64))",
        "np.cumsum(firsts, dtype=np.int64)",
    ),
    "padding counts": Mutation("counted = inside.copy()", "counted = np.ones_like(inside)"),
    "windows without targets": Mutation("and whole and self.seq_len > 3:", "and self.seq_len > 3:"),
    "short windows without targets": Mutation("and whole and self.seq_len > 3:", "and whole:"),
    "weights in phase": Mutation(
        "np.arange(len(weights)) * 0.6180339887498949", "np.arange(len(weights)) * 0.0"
    ),
    "groups begin with the first": Mutation(
        "windows[number].append(first + record)", "windows[number].append(record)"
    ),
    "equal lengths in reverse": Mutation(
        'np.argsort(-group, kind="stable").tolist()',
        'np.argsort(-group[::-1], kind="stable")[::-1].tolist()',
    ),
}
SERVED = {
    "a divided static scale": Mutation(
        "casts.cast_fp8(x, static.reciprocal(),", "casts.cast_fp8(x, static,"
    ),
    "no bias": Mutation("bias = None if self.bias is None else self.bias.float()", "bias = None"),
    "the first static scale": Mutation("torch.stack(static).amax()", "torch.stack(static)[0]"),
    "the smallest static scale": Mutation(
        "torch.stack(static).amax()", "torch.stack(static).amin()"
    ),
    "idle experts run": Mutation(
        "for linear, part in parts if len(part)]", "for linear, part in parts]"
    ),
    "experts in the order of files": Mutation(
        "for name in quantized_names:", "for name in weights:"
    ),
    "blocks of one token and all channels": Mutation(
        "    block = (1, 128)\n", "    block = (1, x.shape[1])\n"
    ),
    "blocks of two tokens": Mutation("    block = (1, 128)\n", "    block = (2, 128)\n"),
    "a product in BF16": Mutation(
        "return F.linear(inputs, self.weight, bias).to(x.dtype)",
        "return F.linear(inputs.to(x.dtype), self.weight.to(x.dtype), None if bias is None else bias.to(x.dtype))",
    ),
    "a global scale of the tensor": Mutation(
        "encode_nvfp4(x, WeightOptions(), whole=static)", "encode_nvfp4(x, WeightOptions())"
    ),
}
CALIBRATION = {
    "a NaN becomes a scale": Mutation(
        "finite = amaxes.nan_to_num(nan=0.0, posinf=torch.inf)", "finite = amaxes"
    ),
    "an infinity becomes large": Mutation(
        "amaxes.nan_to_num(nan=0.0, posinf=torch.inf)", "amaxes.nan_to_num(nan=0.0)"
    ),
    "an amax so far is lost": Mutation(
        "torch.maximum(part.flatten(), state.amax_history[0])", "part.flatten()"
    ),
    "a scale alone is no measurement": Mutation(" | (state.scale[inputs] != 1).any()", ""),
    "a history alone is no measurement": Mutation(
        "(state.amax_history[:, inputs] != 0).any() | ", ""
    ),
    "the newest batch only": Mutation(
        "amaxes[operand].clamp_(min=torch.linalg.vector_norm(tensor.detach(), torch.inf))",
        "amaxes[operand].copy_(torch.linalg.vector_norm(tensor.detach(), torch.inf))",
    ),
}
STATE = {
    "a new history of frozen state": Mutation(
        'live[name].fill_(1.0 if name[-1] == "scale" else 0.0)', "pass"
    ),
    "a new scale of frozen state": Mutation(
        'live[name].fill_(1.0 if name[-1] == "scale" else 0.0)', "live[name].fill_(0.0)"
    ),
    "frozen histories move": Mutation(
        'tensors[place, direction, "amax_history"] = state.amax_history', "pass"
    ),
    "a margin is not converted": Mutation('* 2.0 ** -recipe.fields.get("margin", 0)', "* 1.0"),
    "a scale without an amax is converted": Mutation(
        "torch.where(seen, _largest(now, direction) / _largest(before, direction), 1.0)",
        "_largest(now, direction) / _largest(before, direction)",
    ),
    "scales are not converted": Mutation(
        "        if before is None or now is None or before == now:\n", "        if True:\n"
    ),
    "formats of gradients are E4M3": Mutation(
        'wide = direction == "scaling_bwd" and', "wide = False and"
    ),
    "E5M2 without its recipe": Mutation(' and recipe.fields["fp8_format"] == "HYBRID"', ""),
    "the oldest of a longer history": Mutation(
        "out[-rows:] = history[-rows:]", "out[-rows:] = history[1 : rows + 1]"
    ),
    "the row of the step is lost": Mutation("    out[0] = history[0]\n", ""),
    "a converted scale is infinite": Mutation(
        ").clamp_(max=FLT_MAX)\n\n\n@torch.no_grad()\ndef divide",
        ")\n\n\n@torch.no_grad()\ndef divide",
    ),
}
EARLIER = {
    "gradients of earlier runs as they are": Mutation(
        "        state.amax_history.div_(divisor)\n", ""
    ),
    "scales of earlier runs as they are": Mutation(
        "state.scale.mul_(torch.where(seen, divisor, 1.0))", "state.scale.mul_(1.0)"
    ),
    "an unused scale of earlier runs": Mutation(
        "state.scale.mul_(torch.where(seen, divisor, 1.0))", "state.scale.mul_(divisor)"
    ),
}
PRECISION = {
    "scales of other recipes are taken": Mutation(
        "return recipe is not None and SCHEMES[recipe.scheme].stateful", "return recipe is not None"
    ),
    "scales stay those of the old recipe": Mutation(
        "    if accepted:\n        convert_scales(", "    if False:\n        convert_scales("
    ),
}
EXTRA = {
    "directions change places": Mutation(
        "widths = [WIDTHS[way] * gemms for way in DIRECTIONS]",
        "widths = [WIDTHS[way] * gemms for way in DIRECTIONS[::-1]]",
    ),
    "the first row of a history is lost": Mutation(
        'f"{owner}.{way}.amax_history": part[1:]}', 'f"{owner}.{way}.amax_history": part[2:]}'
    ),
    "experts are not counted": Mutation(
        "widths = [WIDTHS[way] * gemms for", "widths = [WIDTHS[way] for"
    ),
}
REGION = {
    "a failed pass keeps its amaxes": Mutation("                step.zero_()\n", ""),
    "a failed pass loses those of weights": Mutation(
        "                    step[weights] = before\n", "                    pass\n"
    ),
    "an evaluation moves scales": Mutation(
        "        elif not (model.training and torch.is_grad_enabled()):\n", "        elif False:\n"
    ),
    "scales are never updated": Mutation(
        "            te.FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)",
        "            pass",
    ),
    "a second output saves again": Mutation(
        "        if saved:  # another output of this pass was first\n            return\n", ""
    ),
    "the flag is taken once per autocast": Mutation(
        "            state.is_first_fp8_module = enabled and self.first\n", "            pass\n"
    ),
}
WEIGHTS = {
    "a scale of the first cast": Mutation(
        "if _delayed(quantizer) and (amax := value.abs().amax().float()) > 0:",
        "if False and (amax := value):",
    ),
    "a zero weight has a scale": Mutation(
        "(amax := value.abs().amax().float()) > 0:", "(amax := value.abs().amax().float()) >= 0:"
    ),
    "the transposed copy is old": Mutation(
        '    if "data" in _parts(fp8) and usages["columnwise"]:\n', "    if False:\n"
    ),
    "another library's scales are powers of two": Mutation(
        "    if not bool((mantissas == 0.5).all()):\n", "    if False:\n"
    ),
    "a restored weight has another scale": Mutation(
        '        quantizer.scale.copy_(saved["scale"])\n', ""
    ),
    "padding of block scales": Mutation(
        "            tensor.zero_()  # the padding", "            pass  # the padding"
    ),
    "values of long ago": Mutation(
        "        fp8.__dict__.pop(_INITIAL_VALUE, None)  # values", "        pass  # values"
    ),
}
GATHER = {
    "a stale transposed copy": Mutation(
        "        whole.update_usage(columnwise_usage=False)  # the copy of the data before\n", ""
    ),
    "a stale scale": Mutation("        whole._scale_inv = scale_inv\n", ""),
}
# File -> its mutations and the tests that should find them, options of pytest among them.
PLANTED: list[tuple[str, dict[str, Mutation], str]] = [
    ("model/moe.py", MOE, "tests/model/test_router.py tests/model/test_experts.py"),
    ("data/packing.py", PACKING, "tests/data/test_packing.py"),
    ("serving/served.py", SERVED, "tests/serving/test_parity.py"),
    ("engine/emulated/grouped.py", GROUPED, "tests/engine/test_grouped.py"),
    ("kernels/elementwise.py", ELEMENTWISE, "tests/kernels/test_elementwise.py"),
    ("kernels/lm_head.py", HEAD, "tests/kernels/test_lm_head.py tests/kernels/test_elementwise.py"),
    ("fp8/calibration.py", CALIBRATION, "tests/fp8/test_scaling_state.py tests/model/test_calibration.py"),
    ("model/kv_cache.py", CACHE, "tests/model/test_kv_cache.py tests/model/test_kinds.py -k cache"),
    ("kernels/sdpa.py", SDPA, "tests/model/test_kv_cache.py"),
    (
        "model/deltanet.py", DELTANET,
        "tests/model/test_linear_attention.py tests/model/test_kv_cache.py tests/model/test_kinds.py -k linear",
    ),
    (
        "model/convolution.py", CONVOLUTION,
        "tests/model/test_linear_attention.py tests/model/test_kv_cache.py tests/model/test_kinds.py -k linear",
    ),
    ("model/latent.py", LATENT, "tests/model/test_latent.py tests/model/test_kinds.py -k latent"),
    ("model/router.py", ROUTER, "tests/model/test_router.py tests/model/test_experts.py"),
    ("model/forward_context.py", CONTEXT, "tests/model/test_rope.py tests/model/test_experts.py"),
    ("model/inputs.py", INPUTS, "tests/model/test_rope.py tests/model/test_inputs.py"),
    ("fp8/scaling_state.py", STATE, "tests/fp8/test_scaling_state.py"),
    ("fp8/precision.py", PRECISION, "tests/fp8/test_scaling_state.py"),
    ("fp8/extra_state.py", EXTRA, "tests/fp8/test_extra_state.py"),
    ("fp8/region.py", REGION, "tests/fp8/test_region.py"),
    ("fp8/primary_weights.py", WEIGHTS, "tests/fp8/test_primary_weights.py"),
    ("fp8/fsdp_gather.py", GATHER, "tests/fp8/test_fsdp_gather.py"),
    ("fp8/calibration.py", AMONG, "tests/fp8/test_scaling_state.py"),
    ("model/router.py", TOGETHER, "tests/training/test_step_weights.py"),
    ("fp8/scaling_state.py", EARLIER, "tests/fp8/test_scaling_state.py"),
]  # fmt: skip


def copy_of(project: Path, folder: Path) -> Path:
    """Return a copy of what tests need of the project."""
    for name in COPIED:
        source = project / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, folder / name)
    return folder


def forget_bytecode(path: Path) -> None:
    """Remove the bytecode of a file, which Python tells from that of another text by the second it was written in."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def tests_fail(folder: Path, tests: str) -> bool:
    """Return whether the tests fail in a process of their own, which imports the copy in `folder`."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return status != 0
    code = 1
    try:
        os.chdir(folder)
        os.environ["PYTHONPATH"] = str(folder)
        sys.path[:0] = [str(folder)]
        with (folder / "output.txt").open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            found = [word for word in tests.split() if "/" not in word or (folder / word).exists()]
            code = int(
                pytest.main(
                    ["-x", "-q", "-p", "no:cacheprovider", "--tb=line", "-m", "not slow", *found]
                )
            )
    finally:
        os._exit(min(code, 1))


def verdict_of(planted: str, path: Path, text: str, project: Path, tests: str) -> str:
    """Return what becomes of the mistake `planted` into the file at `path`, which has its `text` again afterwards."""
    try:
        compile(planted, str(path), "exec")
    except SyntaxError as error:
        return f"is no Python: {error}"
    path.write_text(planted)
    forget_bytecode(path)
    try:
        return "killed" if tests_fail(project, tests) else "LIVES"
    finally:
        path.write_text(text)
        forget_bytecode(path)


def main() -> int:
    """Plant the mutations that are asked for; return 1 if one lives."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], help="words, of which the file or the mutation has one"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the mutations, and which do not match"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        project = copy_of(ROOT, Path(folder))
        compileall.compile_dir(project / "te_models", quiet=1)
        for name, mutations, tests in PLANTED:
            path = project / "te_models" / name
            text = path.read_text()
            sound = None  # whether the tests pass without a mistake: known after the first run
            for what, mutation in mutations.items():
                if not any(word in f"{name}: {what}" for word in options.only):
                    continue
                start = time.monotonic()
                planted = mutation.planted(text)
                if planted is None:
                    verdict = "its text is not in the file once"
                elif options.list:
                    verdict = "listed"
                else:
                    if sound is None:
                        sound = not tests_fail(project, tests)
                        print(f"{time.monotonic() - start:5.1f} s without a mistake: {tests}")
                        start = time.monotonic()
                    verdict = verdict_of(planted, path, text, project, tests)
                    if not sound:
                        verdict = "its tests fail without it, or are none"
                bad += verdict not in ("killed", "listed")
                print(f"{verdict:8} {time.monotonic() - start:5.1f} s  {name}: {what}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
