"""Pieces inside the network that are less usual: gradient modes, hooks, own functions, python state."""

from __future__ import annotations

from tests.pack.step_piece import Piece

BLOCKS: list[Piece] = [
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
            "h + F.linear(h, self.l{i}.weight.detach()) ; h + 0.5 * (h.round() - h).detach() ; h - h.data.mean(0)»"
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
        forward="h = «Fn{i}.apply ; fn{i}»(h, self.w{i}) + 0.3 * h",
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
            "h = 0.3 * h + «torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -20, 20) ; h + 0.5 * (torch.round(h * 8) / 8 - h).detach() ; "
            "torch.fake_quantize_per_channel_affine(h, torch.full((6,), 0.1, dtype=h.dtype), "
            "torch.zeros(6, dtype=torch.int32), 1, -8, 7)»"
        ),
    ),
    Piece(
        name="observer",
        init="self.l{i} = torch.ao.quantization.FakeQuantize(observer=torch.ao.quantization.MovingAverageMinMaxObserver)",
        forward="h = 0.3 * h + self.l{i}(h)",
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
            "h = h + 0.5 * (self.e{i}[near] - h).detach()"
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
    Piece(
        name="activations caught by a hook",
        init=(
            "self.l{i}, self.a{i} = nn.Linear(6, 6), {}\n"
            "self.l{i}.register_forward_hook(lambda m, inputs, out: self.a{i}.update(out=out))"
        ),
        forward="h = h + self.l{i}(h)\nh = h + «self.a{i}['out'] ; self.a{i}.pop('out')»",
    ),
    Piece(
        name="packed sequence",
        init="self.l{i} = nn.«GRU ; LSTM»(3, 3, batch_first=True)",
        forward=(
            "lengths = (x[:, 0] > 0).long() + 1\n"
            "s = nn.utils.rnn.pack_padded_sequence(h.view(len(h), 2, 3), lengths, batch_first=True, enforce_sorted=False)\n"
            "h = nn.utils.rnn.pad_packed_sequence(self.l{i}(s)[0], batch_first=True, total_length=2)[0].flatten(1)"
        ),
    ),
    Piece(
        name="buffer that changes its shape",
        init="self.register_buffer('b{i}', torch.zeros(1, 6))",
        forward="if self.training:\n    self.b{i} = torch.cat([self.b{i}, h.detach()[:1]])« ; [-4:]»\nh = h - self.b{i}.mean(0)",
    ),
    Piece(
        name="buffer that is another name",
        init="self.l{i} = nn.Linear(6, 6)\nself.register_buffer('b{i}', «torch.zeros(6, 6) ; self.l{i}.weight.detach().clone()»)",
        forward="«self.b{i} = self.l{i}.weight.detach() ; self.b{i} = self.l{i}.weight.detach().clone() ; self.b{i} = self.l{i}.weight.data.t()»\nh = self.l{i}(h) + F.linear(h, self.b{i})",
    ),
    Piece(
        name="two buffers change places",
        init="self.register_buffer('a{i}', torch.zeros(6))\nself.register_buffer('b{i}', torch.ones(6))",
        forward="self.a{i}, self.b{i} = «self.b{i}, self.a{i} ; self.b{i}, h.detach().mean(0) ; self.b{i} * 0.9, self.a{i} + 0.1»\nh = h + 0.1 * self.a{i}",
    ),
    Piece(
        name="numpy",
        init="self.q = q",
        forward=(
            "h = «h * torch.from_numpy(np.linspace(0.5, 1.5, 6)) ; h + float(np.sin(self.q['w'])) ; h * torch.tensor(np.float64(self.q['t'])) ; "
            "h + torch.from_numpy(x.detach().numpy().clip(-1, 1)) ; h * np.float64(0.5) ; h + float(h.detach().mean())»"
        ),
    ),
    Piece(
        name="mode changed in forward",
        init="self.l{i} = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.BatchNorm1d(6))",
        forward=(
            "before = self.l{i}.training\nself.l{i}.«eval() ; train(False)»\ng = self.l{i}(h)\nself.l{i}.train(before)\n"
            "h = «g + self.l{i}(h) ; self.l{i}(h) + g.detach()»"
        ),
    ),
    Piece(
        name="saved tensors packed",
        init="self.l{i} = nn.Linear(6, 6)",
        forward=(
            "with torch.autograd.graph.«save_on_cpu() ; saved_tensors_hooks(lambda t: t * 1.0, lambda t: t)»:\n    h = torch.tanh(self.l{i}(h))"
        ),
    ),
    Piece(
        name="logging",
        top="import logging, warnings\nLOG{i} = logging.getLogger('drawn')",
        forward="«LOG{i}.debug('mean %s', h.shape) ; warnings.warn('drawn', stacklevel=2) ; assert h.shape[1] == 6 ; assert torch.isfinite(h).all() ; torch._assert(h.shape[1] == 6, 'six')»",
    ),
    Piece(
        name="layer chosen by a number",
        init="self.l{i} = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Identity()])\nself.k{i} = q['k'] - 1",
        forward="h = torch.tanh(self.l{i}[self.k{i}](h))",
    ),
    Piece(
        name="weights from a network",
        init="self.l{i} = nn.Linear(6, 36)",
        forward="h = «torch.bmm(self.l{i}(x).view(-1, 6, 6), h[:, :, None])[:, :, 0] ; F.linear(h, self.l{i}(x.mean(0)).view(6, 6)) ; torch.einsum('bij,bj->bi', self.l{i}(x).view(-1, 6, 6), h)»",
    ),
    Piece(
        name="seeded in forward",
        forward="«torch.manual_seed(3)\nh = h + 0.1 * torch.randn_like(h) ; with torch.random.fork_rng():\n    torch.manual_seed(3)\n    h = h + 0.1 * torch.randn_like(h)»",
    ),
]
