"""Pieces inside the network, simplest first: each makes another `h` ([B, 6]) of `h` and `x`."""

from __future__ import annotations

from tests.pack.step_piece import Piece

PLAIN: list[Piece] = [
    Piece(
        name="linear",
        init="self.l{i} = nn.Linear(6, 6« ; , bias=False»)",
        forward="h = «torch.tanh ; F.relu ; F.gelu ; F.silu ; F.softplus ; torch.sigmoid»(self.l{i}(h))",
    ),
    Piece(name="residual", init="self.l{i} = nn.Linear(6, 6)", forward="h = h + self.l{i}(h« ; .detach()»)"),
    Piece(name="dropout module", init="self.l{i} = nn.Dropout(«0.2 ; q['p']»)", forward="h = self.l{i}(h)"),
    Piece(
        name="dropout function",
        init="self.p{i} = «0.3 ; q['p']»",
        forward="h = F.«dropout ; alpha_dropout»(h, self.p{i}, training=«self.training ; True»)",
    ),
    Piece(
        name="batch norm",
        init="self.l{i} = nn.BatchNorm1d(6« ; , momentum=0.3 ; , affine=False ; , momentum=None»)",
        forward="h = self.l{i}(h)",
    ),
    Piece(
        name="batch norm, frozen",
        init="self.l{i} = nn.BatchNorm1d(6).eval()",
        forward="«self.l{i}.eval() ; self.l{i}.training = False»\nh = self.l{i}(h)",
    ),
    Piece(
        name="batch norm by hand",
        init="self.register_buffer('m{i}', torch.zeros(6))\nself.register_buffer('v{i}', torch.ones(6))",
        forward="h = F.batch_norm(h, self.m{i}, self.v{i}, training=«self.training ; True», momentum=«0.1 ; 0.5»)",
    ),
    Piece(
        name="norm",
        init="self.l{i} = «nn.LayerNorm(6) ; nn.RMSNorm(6) ; nn.GroupNorm(2, 6) ; nn.LayerNorm(6, bias=False)»",
        forward="h = self.l{i}(h)",
    ),
    Piece(
        name="normalised",
        forward=(
            "h = «F.normalize(h, dim=1, eps=0.1) ; h / (h.norm(dim=1, keepdim=True) + 0.5) ; h.clamp(-1.0, self.q['c'] + 1)"
            " ; h - h.mean(0, keepdim=True) ; h.softmax(1) ; torch.tanh(h / self.q['t'])»"
        ),
        init="self.q = q",
    ),
    Piece(
        name="running mean",
        init="self.register_buffer('m{i}', torch.zeros(6)« ; , persistent=False»)",
        forward=(
            "if self.training:\n    «self.m{i}.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)"
            " ; self.m{i} = 0.9 * self.m{i} + 0.1 * h.detach().mean(0)"
            " ; self.m{i}.lerp_(h.detach().mean(0), 0.2)"
            " ; self.m{i}.copy_(0.5 * self.m{i} + 0.5 * h.detach().mean(0))"
            " ; self.m{i}[:3] += h.detach().mean(0)[:3]»\n"
            "h = h - self.m{i}"
        ),
    ),
    Piece(
        name="running mean under no_grad",
        init="self.register_buffer('m{i}', torch.zeros(6))",
        forward="with torch.no_grad():\n    self.m{i} «+= 0.1 * h.mean(0) ; = self.m{i} * 0.9 + h.mean(0)»\nh = h - self.m{i}",
    ),
    Piece(
        name="counter in a buffer",
        init="self.register_buffer('n{i}', torch.zeros((), dtype=torch.long))",
        forward=(
            "«self.n{i} += 1 ; self.n{i}.add_(1) ; self.n{i} = self.n{i} + 1»\n"
            "h = «h / (1 + 0.1 * self.n{i}) ; torch.where(self.n{i} > 3, h, h.detach()) ; "
            "h.masked_fill(self.n{i} < 3, 0.5) ; h * torch.clamp(self.n{i} / 5.0, max=1.0) ; h * (self.n{i} % 2 == 0)»"
        ),
    ),
    Piece(
        name="mask",
        init="self.register_buffer('k{i}', torch.arange(6) % 3 > 0)\nself.c{i} = «0.2 ; q['c']»",
        forward=(
            "h = «h * self.k{i} ; h.masked_fill(self.k{i}, 0.3) ; torch.where(h > self.c{i}, h, 0.1 * h) ; "
            "h.masked_fill(h > self.c{i}, 0.0) ; torch.where(self.k{i}, h, h.detach()) ; h * (x > self.c{i}) ; "
            "torch.where(x[:, :1] > 0, h, -h)»"
        ),
    ),
    Piece(
        name="in place",
        init="self.l{i} = nn.Linear(6, 6)\nself.c{i} = q['c']",
        forward=(
            "h = self.l{i}(h)\n"
            "«h.mul_(0.5) ; h += x ; h.clamp_(-1.0, 1.0) ; F.relu(h, inplace=True) ; h.masked_fill_(h > self.c{i}, 0.0)"
            " ; h[:, 0] = 0.0 ; h[:, :2] *= 2.0 ; h.add_(torch.randn_like(h), alpha=0.1) ; h[0] = x[0]"
            " ; h.tanh_() ; h.sub_(h.mean(0)) ; h[:, 1] = h[:, 2]»"
        ),
    ),
    Piece(
        name="noise",
        init="self.w{i} = «0.1 ; q['w']»",
        forward=(
            "if self.training:\n    h = h + self.w{i} * «torch.randn_like(h) ; torch.rand_like(h) ; "
            "torch.randn(h.shape, dtype=h.dtype) ; torch.empty_like(h).normal_() ; torch.bernoulli(torch.sigmoid(h)) ; "
            "torch.rand(len(h), 1, dtype=h.dtype) ; torch.randn(6, dtype=h.dtype)»"
        ),
    ),
    Piece(
        name="own dropout",
        init="self.p{i} = «0.2 ; q['p']»",
        forward="if self.training:\n    h = h * (torch.rand_like(h) > self.p{i})« ; / (1 - self.p{i})»",
    ),
    Piece(
        name="recurrent",
        init="self.l{i} = nn.«LSTM ; GRU ; RNN»(3, 3, batch_first=True« ; , num_layers=2, dropout=0.3»)",
        forward="h = self.l{i}(h.view(len(h), 2, 3))[0].flatten(1)",
    ),
    Piece(
        name="attention",
        init="self.l{i} = nn.MultiheadAttention(6, 2, «dropout=0.0 ; dropout=0.2 ; bias=False», batch_first=True)",
        forward=(
            "s = torch.stack([h, x, h * x], 1)\n"
            "«mask = None ; mask = torch.stack([x[:, 0] > 9, x[:, 1] > 0, x[:, 2] > 0], 1)»\n"
            "h = self.l{i}(s, s, s, key_padding_mask=mask« ; , need_weights=False»)[0].mean(1)"
        ),
    ),
    Piece(
        name="transformer",
        init="self.l{i} = nn.TransformerEncoderLayer(6, 2, 8, «0.0 ; 0.1», batch_first=True« ; , norm_first=True»)",
        forward=(
            "s = torch.stack([h, x, h * x], 1)\n"
            "mask = torch.stack([x[:, 0] > 9, x[:, 1] > 0, x[:, 2] > 0], 1)\n"
            "h = self.l{i}(s« ; , src_key_padding_mask=mask»)[:, 0]"
        ),
    ),
    Piece(
        name="embedding",
        init="self.l{i} = nn.Embedding(5, 6« ; , padding_idx=0»)",
        forward="h = h + self.l{i}((x[:, :3].abs() * 2).long().clamp(max=4)).mean(1)",
    ),
    Piece(
        name="embedding bag",
        init="self.l{i} = nn.EmbeddingBag(5, 6« ; , mode='sum' ; , mode='max'»)",
        forward="h = h + self.l{i}((x[:, :3].abs() * 2).long().clamp(max=4))",
    ),
    Piece(
        name="convolution",
        init="self.l{i} = nn.Conv1d(1, 2, 3, padding=1« ; , padding_mode='circular'»)",
        forward="h = «F.max_pool1d ; F.avg_pool1d»(self.l{i}(h[:, None]), 2).flatten(1)",
    ),
    Piece(
        name="experts",
        init="self.g{i}, self.l{i} = nn.Linear(6, 3), nn.Parameter(torch.randn(3, 6, 6) * 0.3)",
        forward=(
            "w = self.g{i}(h).softmax(1)\n"
            "«pass ; top = w.topk(2); w = torch.zeros_like(w).scatter(1, top.indices, top.values)»\n"
            "h = torch.einsum('bi,eij,be->bj', h, self.l{i}, w)"
        ),
    ),
    Piece(
        name="weight norm",
        init="self.l{i} = parametrizations.weight_norm(nn.Linear(6, 6))",
        forward="h = self.l{i}(h)",
    ),
    Piece(
        name="tied weights",
        init="self.l{i}, self.k{i} = nn.Linear(6, 6), nn.Linear(6, 6)\n«self.k{i}.weight = self.l{i}.weight ; pass»",
        forward="h = F.linear(torch.tanh(self.l{i}(h)), «self.k{i}.weight ; self.l{i}.weight.t()»)",
    ),
    Piece(
        name="shape",
        forward="«if len(h) > 4: ; if h.shape[0] % 2: ; for _ in range(min(2, len(h))): ; if self.training:»\n    h = h * 1.5",
    ),
    Piece(
        name="two passes",
        init="self.l{i}, self.q = nn.Linear(6, 6), q",
        forward="for _ in range(«2 ; self.q['k']»):\n    h = torch.tanh(self.l{i}(h)« ; + h.detach()»)",
    ),
]

UNUSUAL: list[Piece] = [
    Piece(
        name="grad mode",
        init="self.l{i} = nn.Linear(6, 6)",
        forward=(
            "with «torch.no_grad() ; torch.inference_mode() ; torch.set_grad_enabled(False) ; "
            "torch.set_grad_enabled(self.training)»:\n    g = self.l{i}(«h ; x»)\n"
            "h = «h + g ; h * g.clone().sigmoid() ; g.clone() + x»"
        ),
    ),
    Piece(
        name="grad mode as a statement",
        init="self.l{i} = nn.Linear(6, 6)",
        forward=(
            "before = torch.is_grad_enabled()\ntorch.set_grad_enabled(False)\ng = self.l{i}(h)\n"
            "torch.set_grad_enabled(before)\nh = h * torch.sigmoid(g)"
        ),
    ),
    Piece(
        name="method under no_grad",
        top="@torch.«no_grad ; inference_mode»()\ndef frozen{i}(layer, h):\n    return torch.tanh(layer(h))",
        init="self.l{i} = nn.Linear(6, 6)",
        forward="h = h + frozen{i}(self.l{i}, h)",
    ),
    Piece(
        name="past autograd",
        init="self.l{i} = nn.Linear(6, 6)",
        forward=(
            "h = «h + self.l{i}(h).data ; h * torch.sigmoid(self.l{i}(h).data) ; F.linear(h, self.l{i}.weight.data) ; "
            "h + F.linear(h, self.l{i}.weight.detach()) ; h + (h.round() - h).detach() ; h - h.data.mean(0)»"
        ),
    ),
    Piece(
        name="toggle in forward",
        init="self.l{i} = nn.Linear(6, 6)",
        forward=(
            "«self.l{i}.requires_grad_(False) ; self.l{i}.weight.requires_grad = False»\ng = self.l{i}(h)\n"
            "«self.l{i}.requires_grad_(True) ; self.l{i}.weight.requires_grad = True»\n"
            "h = g« ; + self.l{i}(x)»"
        ),
    ),
    Piece(
        name="custom function",
        top=(
            "class Fn{i}(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, h, w):\n"
            "        ctx.w = w\n        ctx.save_for_backward(h)\n"
            "        return «h.sign() ; h.clone() ; h * torch.sigmoid(h) ; h.view_as(h)»\n\n"
            "    @staticmethod\n    def backward(ctx, g):\n        (h,) = ctx.saved_tensors\n"
            "        return «g * ctx.w ; -ctx.w * g ; g * (h.abs() < 1) ; g.clamp(-0.01, 0.01)», None\n\n\nfn{i} = Fn{i}.apply"
        ),
        init="self.w{i} = «0.5 ; q['w']»",
        forward="h = «Fn{i}.apply ; fn{i}»(h, self.w{i})",
    ),
    Piece(
        name="custom function, newer form",
        top=(
            "class Fn{i}(torch.autograd.Function):\n    @staticmethod\n    def forward(h):\n        return torch.round(h * 4) / 4\n\n"
            "    @staticmethod\n    def setup_context(ctx, inputs, output):\n        ctx.save_for_backward(inputs[0])\n\n"
            "    @staticmethod\n    def backward(ctx, g):\n        return g * (ctx.saved_tensors[0].abs() < 2)"
        ),
        forward="h = h + Fn{i}.apply(h)",
    ),
    Piece(
        name="scripted function",
        top=(
            "@torch.jit.script\ndef swish{i}(v: Tensor, w: float) -> Tensor:\n    return v * torch.sigmoid(w * v)\n\n\n"
            "for _ in range(«0 ; 3»):\n"
            "    swish{i}(torch.randn(2, 6, dtype=torch.float64, requires_grad=True), 1.0).sum().backward()"
        ),
        init="self.w{i} = «1.0 ; q['w']»",
        forward="h = swish{i}(h, self.w{i})",
    ),
    Piece(
        name="scripted function with a branch",
        top=(
            "@torch.jit.script\ndef act{i}(v: Tensor) -> Tensor:\n    if v.shape[0] > 4:\n        return torch.tanh(v)\n"
            "    return torch.relu(v) + 0.1 * v.detach()"
        ),
        forward="h = act{i}(h)",
    ),
    Piece(
        name="checkpoint",
        init="self.l{i} = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(«0.0 ; 0.2 ; q['p']»))",
        forward="h = checkpoint(self.l{i}, h, use_reentrant=«False ; True»)",
    ),
    Piece(
        name="parametrization",
        top="class Symmetric{i}(nn.Module):\n    def forward(self, w):\n        return w.triu() + w.triu(1).t()",
        init=(
            "self.l{i} = nn.Linear(6, 6)\n"
            "«parametrize.register_parametrization(self.l{i}, 'weight', Symmetric{i}()) ; parametrizations.spectral_norm(self.l{i})"
            " ; parametrizations.orthogonal(self.l{i}) ; torch.nn.utils.weight_norm(self.l{i})"
            " ; torch.nn.utils.spectral_norm(self.l{i})»"
        ),
        forward="h = self.l{i}(h)",
    ),
    Piece(
        name="complex",
        init="self.c{i} = nn.Parameter(torch.randn(3, 3, dtype=torch.complex128) * 0.5)",
        forward=(
            "z = torch.complex(h[:, :3], h[:, 3:]) «@ self.c{i} ; * self.c{i}[0] ; @ self.c{i}.conj().t()»\n"
            "h = «torch.view_as_real(z).flatten(1) ; torch.cat([z.real, z.abs()], 1) ; torch.cat([(z * z.conj()).real, z.angle()], 1)»"
        ),
    ),
    Piece(
        name="fourier",
        init="self.f{i} = nn.Parameter(torch.ones(4))",
        forward="h = «torch.fft.irfft(torch.fft.rfft(h) * self.f{i}, n=6) ; torch.fft.fft(h).real * self.f{i}[0]»",
    ),
    Piece(
        name="fake quantisation",
        forward=(
            "h = «torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -20, 20) ; h + (torch.round(h * 8) / 8 - h).detach() ; "
            "torch.fake_quantize_per_channel_affine(h, torch.full((6,), 0.1, dtype=h.dtype), "
            "torch.zeros(6, dtype=torch.int32), 1, -8, 7)»"
        ),
    ),
    Piece(
        name="observer",
        init="self.l{i} = torch.ao.quantization.FakeQuantize(observer=torch.ao.quantization.MovingAverageMinMaxObserver)",
        forward="h = self.l{i}(h)",
    ),
    Piece(
        name="detached recurrence",
        init="self.l{i} = nn.«GRUCell ; RNNCell»(3, 3)",
        forward=(
            "s = torch.zeros(len(h), 3, dtype=h.dtype)\nfor t in range(2):\n"
            "    s = self.l{i}(h.view(len(h), 2, 3)[:, t], s« ; .detach()»)\nh = torch.cat([s, h[:, 3:]], 1)"
        ),
    ),
    Piece(
        name="hidden state kept between steps",
        init="self.s{i} = «None ; torch.zeros(6, dtype=torch.float64)»",
        forward="h = h if self.s{i} is None else h + 0.5 * self.s{i}\nself.s{i} = h.detach().mean(0)",
    ),
    Piece(
        name="counter in an attribute",
        init="self.n{i} = 0",
        forward="self.n{i} += 1\nh = «h * min(1.0, self.n{i} / 4) ; (h if self.n{i} % 2 else h.detach()) ; h / self.n{i}»",
    ),
    Piece(
        name="forward hook",
        top="def half{i}(module, inputs, output):\n    return «output * 0.5 ; output.detach() ; output + inputs[0]»",
        init="self.l{i} = nn.Linear(6, 6)\nself.l{i}.register_forward_hook(half{i})",
        forward="h = self.l{i}(h)",
    ),
    Piece(
        name="backward hook",
        init=(
            "self.l{i} = nn.Linear(6, 6)\n«self.l{i}.register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,))"
            " ; self.l{i}.weight.register_hook(lambda g: g * 0.5)»"
        ),
        forward="h = self.l{i}(h)",
    ),
    Piece(
        name="tensor hook",
        forward="if h.requires_grad:\n    h = h * 1.0\n    h.register_hook(lambda g: g.clamp(-0.01, 0.01))",
    ),
    Piece(
        name="linear algebra",
        init="self.c{i} = q['c']",
        forward=(
            "k = h.t() @ h / len(h)\n"
            "h = h @ «torch.linalg.inv(k + torch.eye(6, dtype=h.dtype)) ; torch.linalg.solve(k + torch.eye(6, dtype=h.dtype), k)"
            " ; torch.linalg.cholesky(k + torch.eye(6, dtype=h.dtype)) ; torch.matrix_exp(-k) ; torch.linalg.pinv(k + 0.5 * torch.eye(6, dtype=h.dtype))»"
        ),
    ),
    Piece(
        name="try cholesky",
        init="self.c{i} = 0.3 * q['c']",
        forward=(
            "k = h.t() @ h / len(h) - self.c{i} * torch.eye(6, dtype=h.dtype)\ntry:\n    h = h @ torch.linalg.cholesky(k)\n"
            "except RuntimeError:\n    h = h @ torch.linalg.cholesky(k + 2 * torch.eye(6, dtype=h.dtype))"
        ),
    ),
    Piece(
        name="functional transform",
        init="self.l{i} = nn.Linear(6, 6)",
        forward=(
            "h = «torch.func.vmap(self.l{i})(h) ; torch.func.vmap(lambda v: torch.tanh(v).cumsum(0))(h) ; "
            "h + torch.func.grad(lambda v: torch.tanh(v).sum())(h) ; "
            "torch.func.functional_call(self.l{i}, {'weight': self.l{i}.weight * 0.5}, (h,), strict=False)»"
        ),
    ),
    Piece(
        name="embedding with max_norm",
        init="self.l{i} = nn.Embedding(5, 6, max_norm=1.0)",
        forward="h = h + self.l{i}((x[:, 0].abs() * 2).long().clamp(max=4))",
    ),
    Piece(
        name="branch on values",
        forward="«if h.mean() > 0: ; if x[0, 0].item() > 0: ; if (h.abs() > 0.9).any(): ; while h.abs().max() > 2:»\n    h = 0.5 * h",
    ),
    Piece(
        name="rows by a mask",
        forward="keep = x[:, 0] > 0\n«h = h.clone(); h[keep] = 0.5 * h[keep] ; h = h.index_fill(0, keep.nonzero()[:, 0], 0.1) ; h = h * keep[:, None]»",
    ),
    Piece(
        name="codebook",
        init="self.register_buffer('e{i}', torch.randn(4, 6))",
        forward=(
            "near = «torch.cdist(h, self.e{i}) ; (h[:, None] - self.e{i}).pow(2).sum(-1)».argmin(1)\n"
            "if self.training:\n    with torch.no_grad():\n"
            "        «self.e{i}.index_add_(0, near, h, alpha=0.05) ; self.e{i}[near] = 0.9 * self.e{i}[near] + 0.1 * h.mean(0)"
            " ; self.e{i} = self.e{i} + 0.1 * F.one_hot(near, 4).to(h.dtype).t() @ h»\n"
            "h = h + (self.e{i}[near] - h).detach()"
        ),
    ),
    Piece(
        name="writes to .data",
        init="self.register_buffer('m{i}', torch.zeros(6))\nself.l{i} = nn.Linear(6, 6)",
        forward=(
            "if self.training:\n    «self.m{i}.data = 0.9 * self.m{i} + 0.1 * h.detach().mean(0) ; "
            "self.m{i}.data.add_(h.data.mean(0)) ; self.l{i}.weight.data.clamp_(-0.3, 0.3) ; self.l{i}.weight.data.mul_(0.99)»\n"
            "h = self.l{i}(h) - self.m{i}"
        ),
    ),
    Piece(
        name="running mean that keeps its graph",
        init="self.register_buffer('m{i}', torch.zeros(6))",
        forward="self.m{i} = (0.5 * self.m{i} + 0.5 * h.mean(0))« ; .detach()»\nh = h - self.m{i}\nself.m{i} = self.m{i}.detach()",
    ),
    Piece(
        name="sampled in forward",
        init="self.l{i} = nn.Linear(6, 6)",
        forward=(
            "d = torch.distributions.«Normal(h, F.softplus(self.l{i}(h)) + 0.1) ; Laplace(h, F.softplus(self.l{i}(h)) + 0.1) ; "
            "RelaxedBernoulli(torch.tensor(0.7, dtype=h.dtype), logits=self.l{i}(h)) ; Gamma(F.softplus(h) + 0.5, F.softplus(self.l{i}(x)) + 0.5)»\n"
            "h = d.rsample()"
        ),
    ),
]
