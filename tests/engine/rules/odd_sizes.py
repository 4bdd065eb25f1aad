"""Small networks around one operator or layer each, of any size: what the tests of bits and of odd sizes train.

A kind is a function of a size that gives a network and a batch of its input; a kind with a rule of its own stands for
the rule, the others for the general path. Sizes that a kind cannot have are left to `sizes`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tests.engine.equality import First, numbers, whole
from torch import Tensor, nn

B = 7
"""Rows of a batch."""

Made = tuple[Callable[[], nn.Module], Tensor]


@dataclass(frozen=True)
class Kind:
    """How a network of one size is made, what it reads, and which sizes it can have."""

    make: Callable[[int], nn.Module]
    reads: str = "rows"
    least: int = 1
    most: int = 33

    def inputs(self, size: int, seed: int = 1, rows: int = B) -> Tensor:
        if self.reads == "tokens":
            return whole(seed, 11, rows, size)
        shape = {
            "rows": (size,), "line": (3, size), "image": (3, size, size), "volume": (2, size, size, size),
            "sequence": (5, size), "words": (size, 6),
        }[self.reads]  # fmt: skip
        return numbers(seed, rows, *shape)


class Apply(nn.Module):
    """A function of the input behind a layer, and of a matrix and a vector that are trained."""

    def __init__(self, size: int, function: Callable[..., Tensor], first: bool) -> None:
        super().__init__()
        self.layer = None if first else nn.Linear(size, size)
        self.w, self.v = nn.Parameter(torch.randn(size, size)), nn.Parameter(torch.randn(size))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x if self.layer is None else self.layer(x), self.w, self.v)


def op(function: Callable[..., Tensor], *, first: bool = False, **limits: Any) -> Kind:
    """`function(h, w, v)` of [B, n], [n, n] and [n]; `first`: h is the batch itself."""
    return Kind(lambda size: Apply(size, function, first), **limits)


def after(layer: Callable[[int], nn.Module], reads: str = "rows", **limits: Any) -> Kind:
    """A layer behind another one, so that its input is the member's own."""

    def make(size: int) -> nn.Module:
        lead = {"rows": nn.Linear(size, size), "line": nn.Conv1d(3, 4, 1), "image": nn.Conv2d(3, 4, 1)}
        return nn.Sequential(lead[reads], layer(size))

    return Kind(make, reads, **limits)


def _positive(w: Tensor) -> Tensor:
    return w @ w.mT + 2 * torch.eye(w.shape[0], dtype=w.dtype)


class Cells(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for row in x.unbind(1):
            state = self.cell(row, state)
        out: Tensor = state[0] if isinstance(state, tuple) else state
        return out


class Attention(nn.Module):
    def __init__(self, mask: str = "", p: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.mask, self.p = nn.Linear(6, 18), mask, p

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 3)).movedim(-3, 0).transpose(-2, -3)
        mask = (x[:, None, None, :, 0] > -1) if self.mask == "bool" else None
        return F.scaled_dot_product_attention(q, k, v, mask, self.p, is_causal=self.mask == "causal")


class Loss(nn.Module):
    """A loss behind a layer, on targets made of the input."""

    def __init__(self, size: int, loss: Callable[..., Tensor], first: bool = False) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(size, size), loss
        self.register_buffer("weight", torch.rand(size) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.layer(x), x, self.weight)


def loss(function: Callable[..., Tensor], **limits: Any) -> Kind:
    """`function(h, x, weight)`."""
    return Kind(lambda size: Loss(size, function), **limits)


def _classes(x: Tensor) -> Tensor:
    return x.abs().argmax(1)


def _encoder(norm_first: bool, p: float = 0.0) -> Callable[[int], nn.Module]:
    return lambda size: nn.TransformerEncoderLayer(6, 2, 7, p, "gelu", batch_first=True, norm_first=norm_first)


ACTIVATIONS = [
    "ReLU", "ReLU6", "LeakyReLU", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish", "Sigmoid", "LogSigmoid", "Tanh",
    "Hardtanh", "Hardswish", "Hardsigmoid", "Hardshrink", "Softshrink", "Tanhshrink", "Softplus", "Softsign",
]  # fmt: skip


LAYERS: dict[str, Kind] = {
    **{name: after(lambda size, name=name: getattr(nn, name)()) for name in ACTIVATIONS},  # type: ignore[misc]
    "Linear": Kind(lambda n: nn.Linear(n, n)),
    "Linear to one": Kind(lambda n: nn.Linear(n, 1)),
    "Linear, no bias, on a sequence": Kind(lambda n: nn.Linear(n, 3, bias=False), "sequence"),
    "Bilinear": op(lambda h, w, v: F.bilinear(h, h, torch.stack([w, w.mT]), v.sum().repeat(2))),
    "Conv1d": after(lambda n: nn.Conv1d(4, 5, 3, padding=1), "line"),
    "Conv1d first": Kind(lambda n: nn.Conv1d(3, 5, 3, padding=1), "line"),
    "Conv2d": after(lambda n: nn.Conv2d(4, 5, 3, padding=1), "image", most=17),
    "Conv2d first": Kind(lambda n: nn.Conv2d(3, 5, 3, padding=1), "image", most=17),
    "Conv2d grouped, strided": after(lambda n: nn.Conv2d(4, 6, 2, 2, 1, groups=2), "image", most=17),
    "Conv3d": Kind(lambda n: nn.Conv3d(2, 3, 2, padding=1), "volume", most=7),
    "ConvTranspose1d": after(lambda n: nn.ConvTranspose1d(4, 3, 3, 2, 1), "line"),
    "ConvTranspose2d": after(lambda n: nn.ConvTranspose2d(4, 2, 3, 2), "image", most=7),
    "BatchNorm1d": after(lambda n: nn.BatchNorm1d(n)),
    "BatchNorm1d first": Kind(lambda n: nn.Sequential(nn.BatchNorm1d(n), nn.Linear(n, n))),
    "BatchNorm2d": after(lambda n: nn.BatchNorm2d(4), "image", most=17),
    "InstanceNorm2d": after(lambda n: nn.InstanceNorm2d(4, affine=True), "image", least=3, most=17),
    "LayerNorm": after(lambda n: nn.LayerNorm(n)),
    "LayerNorm first": Kind(lambda n: nn.Sequential(nn.LayerNorm(n), nn.Linear(n, n))),
    "LayerNorm over two dimensions": Kind(lambda n: nn.Sequential(nn.Linear(n, n), nn.LayerNorm((5, n))), "sequence"),
    "RMSNorm": after(lambda n: nn.RMSNorm(n)),
    "RMSNorm first": Kind(lambda n: nn.Sequential(nn.RMSNorm(n), nn.Linear(n, n))),
    "GroupNorm": after(lambda n: nn.GroupNorm(2, 4), "image", most=17),
    "GroupNorm first": Kind(lambda n: nn.Sequential(nn.GroupNorm(1, n), nn.Linear(n, n))),
    "LocalResponseNorm": after(lambda n: nn.LocalResponseNorm(2), "image", most=7),
    "Embedding": Kind(lambda n: nn.Embedding(11, 5, padding_idx=2), "tokens"),
    "Embedding with max_norm": Kind(lambda n: nn.Embedding(11, 5, max_norm=1.0), "tokens"),
    "EmbeddingBag": Kind(lambda n: nn.EmbeddingBag(11, 5, mode="mean"), "tokens"),
    "Dropout": after(lambda n: nn.Dropout(0.4)),
    "Dropout2d": after(lambda n: nn.Dropout2d(0.4), "image", most=7),
    "AlphaDropout": after(lambda n: nn.AlphaDropout(0.4)),
    "RNN": Kind(lambda n: First(nn.RNN(n, n, batch_first=True)), "sequence", most=17),
    "LSTM": Kind(lambda n: First(nn.LSTM(n, n, batch_first=True)), "sequence", most=17),
    "LSTM deep, both ways, dropout": Kind(
        lambda n: First(nn.LSTM(n, 3, 2, dropout=0.3, bidirectional=True, batch_first=True)), "sequence", most=17
    ),
    "GRU": Kind(lambda n: First(nn.GRU(n, n, batch_first=True)), "sequence", most=17),
    "RNNCell": Kind(lambda n: Cells(nn.RNNCell(n, 5)), "sequence", most=17),
    "LSTMCell": Kind(lambda n: Cells(nn.LSTMCell(n, 5)), "sequence", most=17),
    "GRUCell": Kind(lambda n: Cells(nn.GRUCell(n, 5)), "sequence", most=17),
    "attention": Kind(lambda n: Attention(), "words"),
    "attention, masked": Kind(lambda n: Attention("bool"), "words"),
    "attention, causal, dropout": Kind(lambda n: Attention("causal", 0.3), "words"),
    "MultiheadAttention": Kind(lambda n: Apply6(nn.MultiheadAttention(6, 2, batch_first=True)), "words"),
    "TransformerEncoderLayer": Kind(_encoder(False, 0.1), "words", most=17),
    "TransformerEncoderLayer, norm first": Kind(_encoder(True), "words", most=17),
    "MaxPool1d": after(lambda n: nn.MaxPool1d(3, 2, 1), "line"),
    "MaxPool2d": after(lambda n: nn.MaxPool2d(3, 2, 1), "image", most=17),
    "AvgPool2d": after(lambda n: nn.AvgPool2d(3, 2, 1), "image", most=17),
    "AdaptiveAvgPool2d": after(lambda n: nn.AdaptiveAvgPool2d(2), "image", most=17),
    "AdaptiveAvgPool2d to one": after(lambda n: nn.AdaptiveAvgPool2d(1), "image", most=17),
    "AdaptiveMaxPool2d": after(lambda n: nn.AdaptiveMaxPool2d(2), "image", most=17),
    "LPPool1d": after(lambda n: nn.LPPool1d(2, 3), "line", least=3),
    "Upsample nearest": after(lambda n: nn.Upsample(scale_factor=2), "image", most=7),
    "Upsample bilinear": after(lambda n: nn.Upsample(scale_factor=1.7, mode="bilinear"), "image", most=17),
    "Upsample bicubic": after(lambda n: nn.Upsample(size=5, mode="bicubic"), "image", most=7),
    "PixelShuffle": after(lambda n: nn.PixelShuffle(2), "image", most=7),
    "Unfold and Fold": after(lambda n: nn.Sequential(nn.Unfold(2), nn.Fold((n, n), 2)), "image", least=3, most=7),
    "ReflectionPad1d": after(lambda n: nn.ReflectionPad1d(1), "line", least=3),
    "ConstantPad1d": after(lambda n: nn.ConstantPad1d(1, 0.5), "line"),
    "PReLU": after(lambda n: nn.PReLU(n)),
    "PReLU of one slope": after(lambda n: nn.PReLU()),
    "GLU": Kind(lambda n: nn.Sequential(nn.Linear(n, 2 * n), nn.GLU())),
    "Softmax": after(lambda n: nn.Softmax(1)),
    "LogSoftmax over rows": after(lambda n: nn.LogSoftmax(0)),
    "Softmax2d": after(lambda n: nn.Softmax2d(), "image", most=17),
    "weight norm": Kind(lambda n: nn.utils.parametrizations.weight_norm(nn.Linear(n, n))),
    "spectral norm": Kind(lambda n: nn.utils.parametrizations.spectral_norm(nn.Linear(n, n)), least=3),
    "ELU in place": after(lambda n: nn.ELU(inplace=True)),
    "SiLU in place": after(lambda n: nn.SiLU(inplace=True)),
}


class Apply6(nn.Module):
    """Self-attention of words of six numbers."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


LOSSES: dict[str, Kind] = {
    "mse": loss(lambda h, x, w: F.mse_loss(h, x)),
    "mse, one against many": loss(lambda h, x, w: (h.mean(1) - x[:, 0]).square().sum()),
    "l1": loss(lambda h, x, w: F.l1_loss(h, x, reduction="sum")),
    "smooth l1": loss(lambda h, x, w: F.smooth_l1_loss(h, x, beta=0.7)),
    "huber": loss(lambda h, x, w: F.huber_loss(h, x)),
    "bce": loss(lambda h, x, w: F.binary_cross_entropy(h.sigmoid(), (x > 0).to(h.dtype))),
    "bce with logits": loss(lambda h, x, w: F.binary_cross_entropy_with_logits(h, (x > 0).to(h.dtype))),
    "bce with logits, weighted": loss(
        lambda h, x, w: F.binary_cross_entropy_with_logits(h, (x > 0).to(h.dtype), pos_weight=w)
    ),
    "cross entropy": loss(lambda h, x, w: F.cross_entropy(h, _classes(x))),
    "cross entropy, each": loss(lambda h, x, w: F.cross_entropy(h, _classes(x), reduction="none")),
    "cross entropy, weighted, smoothed": loss(
        lambda h, x, w: F.cross_entropy(h, _classes(x), w, ignore_index=1, label_smoothing=0.1), least=3
    ),
    "cross entropy of probabilities": loss(lambda h, x, w: F.cross_entropy(h, x.softmax(1))),
    "nll": loss(lambda h, x, w: F.nll_loss(h.log_softmax(1), _classes(x))),
    "kl": loss(lambda h, x, w: F.kl_div(h.log_softmax(1), x.softmax(1), reduction="batchmean")),
    "poisson": loss(lambda h, x, w: F.poisson_nll_loss(h, x.abs())),
    "soft margin": loss(lambda h, x, w: F.soft_margin_loss(h, x.sign())),
    "multi margin": loss(lambda h, x, w: F.multi_margin_loss(h, _classes(x)), least=3),
    "multilabel soft margin": loss(lambda h, x, w: F.multilabel_soft_margin_loss(h, (x > 0).to(h.dtype))),
    "hinge": loss(lambda h, x, w: F.hinge_embedding_loss(h, x.sign())),
    "triplet": loss(lambda h, x, w: F.triplet_margin_loss(h, x, h.flip(0))),
    "cosine": loss(lambda h, x, w: F.cosine_embedding_loss(h, x, torch.ones_like(h[:, 0]))),
    "margin ranking": loss(lambda h, x, w: F.margin_ranking_loss(h, x, x.sign())),
}

OPERATORS: dict[str, Kind] = {
    "matmul": op(lambda h, w, v: h @ w),
    "matmul, vectors": op(lambda h, w, v: (h @ v).unsqueeze(1) + w @ v),
    "matmul, batched": op(lambda h, w, v: (h.unsqueeze(2) * v) @ torch.stack([w] * B)),
    "matmul, first": op(lambda x, w, v: x @ w, first=True),
    "addmm": op(lambda h, w, v: torch.addmm(v, h, w)),
    "addmm, scaled": op(lambda h, w, v: torch.addmm(v, h, w, alpha=0.7, beta=1.3)),
    "baddbmm": op(lambda h, w, v: torch.baddbmm(v, h.unsqueeze(1), w.expand(B, -1, -1))),
    "einsum": op(lambda h, w, v: torch.einsum("bi,ij->bj", h, w)),
    "einsum, first": op(lambda x, w, v: torch.einsum("bi,ij,j->bj", x, w, v), first=True),
    "tensordot": op(lambda h, w, v: torch.tensordot(h, w, 1)),
    "inner, outer": op(lambda h, w, v: torch.inner(h, w) + torch.outer(h[:, 0], v)),
    "kron": op(lambda h, w, v: torch.kron(h[:2], w[:2])),
    "cdist": op(lambda h, w, v: torch.cdist(h, w)),
    "solve": op(lambda h, w, v: torch.linalg.solve(_positive(w), h.mT), most=17),
    "cholesky": op(lambda h, w, v: h @ torch.linalg.cholesky(_positive(w)), most=17),
    "inv": op(lambda h, w, v: h @ torch.linalg.inv(_positive(w)), most=17),
    "eigh": op(lambda h, w, v: h * torch.linalg.eigvalsh(_positive(w)), most=17),
    "qr": op(lambda h, w, v: h @ torch.linalg.qr(_positive(w)).Q, most=17),
    "svd": op(lambda h, w, v: h * torch.linalg.svdvals(_positive(w)), most=17),
    "det": op(lambda h, w, v: h * torch.linalg.slogdet(_positive(w)).logabsdet, most=17),
    "matrix_exp": op(lambda h, w, v: h @ torch.matrix_exp(w / 9), most=7),
    "fft": op(lambda h, w, v: torch.fft.fft(h * v).abs()),
    "rfft": op(lambda h, w, v: torch.fft.irfft(torch.fft.rfft(h) * 2, n=h.shape[1]) * v),
    "sum, mean": op(lambda h, w, v: h.sum(1) * h.mean() + w.sum(0).mean()),
    "sum over rows": op(lambda h, w, v: h.sum(0) * v + w.mean(1)),
    "gradients that are one number": op(lambda h, w, v: ((h + v).sum() + w.mean()).unsqueeze(0)),
    "amax, max, min": op(lambda h, w, v: h.amax(1, keepdim=True) * v + w.max(0).values + w.min()),
    "var, std": op(lambda h, w, v: h.var(0) * v + w.std(), least=3),
    "norm": op(lambda h, w, v: h / h.norm() + w.norm(dim=0) + torch.linalg.vector_norm(v, 3)),
    "prod": op(lambda h, w, v: (h.tanh() + 1.5).prod(1, keepdim=True) * v, most=7),
    "cumsum, cumprod": op(lambda h, w, v: h.cumsum(1) + (v.tanh() + 1).cumprod(0)),
    "logsumexp": op(lambda h, w, v: h.logsumexp(1, keepdim=True) * w.logsumexp(0)),
    "sort, topk": op(lambda h, w, v: h.sort(1).values * v + w.topk(1, 0).values),
    "median, kthvalue": op(lambda h, w, v: h.median(1, keepdim=True).values * v + w.kthvalue(1, 0).values),
    "exp, log": op(lambda h, w, v: (h * v).exp().log1p() + w.exp().sum()),
    "sin, cos, atan2": op(lambda h, w, v: torch.atan2(h.sin(), (h * v).cos() + 2)),
    "pow": op(lambda h, w, v: (h.abs() + 0.1) ** 1.5 * v**3),
    "pow of two tensors": op(lambda h, w, v: (h.abs() + 0.1) ** v),
    "rsqrt, erf, expm1": op(lambda h, w, v: (h.square() + 1).rsqrt() * v.erf() + w.expm1().mean(0)),
    "division": op(lambda h, w, v: h / (v.square() + 1) - (1 / (w.square() + 1)).mean(0)),
    "lerp, addcmul, addcdiv": op(lambda h, w, v: torch.lerp(h, h * 2, v) + torch.addcmul(v, h, h, value=0.3)),
    "add with alpha": op(lambda h, w, v: torch.add(h, v, alpha=0.3)),
    "where, masked_fill": op(lambda h, w, v: torch.where(h > v, h, v).masked_fill(h > 1, 0.5)),
    "clamp, maximum": op(lambda h, w, v: torch.maximum(h.clamp(-1, 1), v) + h.clamp(min=v)),
    "remainder": op(lambda h, w, v: torch.remainder(h, v.detach().abs() + 1) + torch.fmod(h, 0.7)),
    "broadcasting": op(lambda h, w, v: h.unsqueeze(2) * w + v + h.mean(0)),
    "expand, repeat": op(lambda h, w, v: h * v.expand(B, -1) + v.repeat(B, 1) * w.mean()),
    "roll, flip": op(lambda h, w, v: h.roll(1, 1) * v.flip(0)),
    "cat, stack": op(lambda h, w, v: torch.cat([h, w]) + torch.stack([v, v * 2]).sum(0)),
    "transposed": op(lambda h, w, v: (h.mT.exp() * v.unsqueeze(1)).mT.tanh()),
    "slices": op(lambda h, w, v: h[1:].tanh() * v + h[:-1].exp()),
    "unfold": op(lambda h, w, v: h.unfold(0, 3, 2).mean(2) * v),
    "gather": op(lambda h, w, v: h.gather(1, h.argsort(1)) * v),
    "index_select": op(lambda h, w, v: w.index_select(0, torch.tensor([0, 0])) * v),
    "index_add": op(lambda h, w, v: w.index_add(0, torch.tensor([0, 0, 0]), h[:3])),
    "scatter_add": op(lambda h, w, v: torch.zeros_like(h).scatter_add(1, h.abs().argsort(1) // 2, h) * v),
    "indexing": op(lambda h, w, v: h[torch.tensor([0, 2, 2, 1])] * v),
    "triu, diagonal": op(lambda h, w, v: h @ w.triu() + w.diagonal() * v),
    "normalize": op(lambda h, w, v: F.normalize(h) @ F.normalize(w)),
    "cosine similarity": op(lambda h, w, v: F.cosine_similarity(h, v.unsqueeze(0))),
    "pairwise distance": op(lambda h, w, v: F.pairwise_distance(h, v)),
    "softmax, first": op(lambda x, w, v: (x * v).softmax(1) + x.log_softmax(0), first=True),
    "functions of the batch": op(lambda x, w, v: x.exp() * v + x.tanh().sum() + (x @ w).sigmoid(), first=True),
    "a constant": op(lambda h, w, v: h * torch.arange(h.shape[1], dtype=h.dtype) @ w),
}

KINDS = {**LAYERS, **{f"loss {name}": kind for name, kind in LOSSES.items()}, **OPERATORS}
SIZES = (1, 3, 5, 7, 17, 33)


def sizes(kind: Kind) -> list[int]:
    return [size for size in SIZES if kind.least <= size <= kind.most]


def number(out: Tensor) -> Tensor:
    """One number that depends on every output, with a gradient of its own for each."""
    return ((out.flatten(1) if out.dim() > 1 else out.view(1, -1)) - 0.3).square().mean() + out.abs().mean()
