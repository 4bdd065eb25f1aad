"""Pieces inside the network, simplest first: each makes another `h` ([B, 6]) of `h` and `x`."""

from __future__ import annotations

from tests.pack.step_piece import Piece

BLOCKS: list[Piece] = [
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
    Piece(
        name="a number as an argument",
        init="self.q = q",
        forward=(
            "n = self.q[«'w' ; 't' ; 'p'»]\nh = «h * n ; h + n ; n - h ; h / n ; h.add(x, alpha=n) ; F.leaky_relu(h, n) ; F.elu(h, n) ; "
            "F.softplus(h, beta=n) ; F.celu(h, n) ; h.clamp(min=-n) ; h.clamp(-n, n) ; F.hardtanh(h, -n, n) ; h.abs() ** n ; "
            "n**h ; torch.lerp(h, x, n) ; h.masked_fill(x > 0, n) ; torch.where(x > 0, h, n) ; torch.full_like(h, n) * h ; "
            "F.layer_norm(h, (6,), eps=n) ; torch.addcmul(h, x, h, value=n) ; F.threshold(h, n, -n) ; h.new_full((6,), n) * h ; "
            "h * torch.tensor(n, dtype=h.dtype) ; h - h.quantile(n / 3, dim=1, keepdim=True) ; F.normalize(h, p=1 + n, dim=1, eps=0.1) ; "
            "F.dropout(h, n / 3, self.training) ; torch.logaddexp(h, h.new_tensor(n)) ; F.rrelu(h, 0.1, 0.1 + n, self.training) ; "
            "h.renorm(2, 0, n) ; torch.maximum(h, torch.as_tensor(n, dtype=h.dtype)) ; F.hardshrink(h, n / 4) ; F.softshrink(h, n / 4) ; "
            "torch.nan_to_num(h, n) ; h % n ; torch.atan2(h, torch.full((), n, dtype=h.dtype)) ; F.rms_norm(h, (6,), eps=n)»"
        ),
    ),
    Piece(
        name="a whole number as an argument",
        init="self.q = q",
        forward=(
            "k = self.q['k']\nh = «h.roll(k, 1) ; h * k ; h**k ; torch.cat([h[:, k:], h[:, :k]], 1) ; h.clone().fill_diagonal_(k) ; "
            "h - h.topk(k, 1).values[:, -1:] ; h + h[:, k : k + 1] ; F.pad(h, (k, 0))[:, :6] ; h.cumsum(1) / k ; "
            "torch.stack([h] * k).mean(0) ; h.repeat(1, k)[:, :6] ; h.kthvalue(k, dim=1, keepdim=True).values + h ; h.tril(k) + x ; "
            "h + F.one_hot(torch.arange(len(h)) % k, 6) ; h.diff(n=k, dim=1, append=x[:, :k]) ; F.group_norm(h, k)»"
        ),
    ),
    Piece(
        name="a draw with a number",
        init="self.q = q",
        forward=(
            "n = self.q[«'w' ; 'p'»]\nif self.training:\n    h = h + 0.1 * «torch.normal(torch.zeros_like(h), n) ; torch.normal(h.detach(), torch.full_like(h, n)) ; "
            "torch.empty_like(h).uniform_(-n, n) ; torch.empty_like(h).normal_(n, n) ; torch.bernoulli(torch.full_like(h, n)) ; "
            "torch.empty_like(h).bernoulli_(n) ; torch.empty_like(h).exponential_(1 + n) ; torch.poisson(torch.full_like(h, n)) ; "
            "torch.randint(0, 1 + self.q['k'], h.shape) ; torch.rand_like(h).pow(n) ; torch.multinomial(h.softmax(1), 6, replacement=True) ; "
            "torch.normal(n, 1.0, h.shape, dtype=h.dtype) ; torch.empty_like(h).log_normal_(0.0, n) ; torch.randn(6, 6, dtype=h.dtype)[torch.randperm(6)][:1]»"
        ),
    ),
    Piece(
        name="view written in place",
        init="self.l{i} = nn.Linear(6, 6)",
        forward=(
            "h = self.l{i}(h)\n«v = h[:, :3]; v.mul_(2.0) ; a, b = h.chunk(2, 1); a += b ; h.view(-1, 2, 3)[:, 0].add_(1.0) ; "
            "h.t()[0] = 0.5 ; h[:, ::2] = x[:, ::2] ; h[1:] += h[:-1].clone() ; h.narrow(1, 0, 2).zero_() ; h.unbind(1)[2].tanh_() ; "
            "torch.add(h.detach(), x, out=torch.empty_like(h)) ; h.diagonal().fill_(0.1) ; h[0, 0] = 1.0 ; h.index_fill_(1, torch.tensor([0, 2]), 0.2)»"
        ),
    ),
    Piece(
        name="rearranged",
        forward=(
            "h = «h.sort(1).values ; h.flip(1) + h ; h.cumsum(1) ; h.gather(1, x.argsort(1)) ; h.scatter(1, x.argsort(1), h) ; "
            "h.scatter_add(1, x.argsort(1), h) ; h.index_select(1, torch.tensor([5, 4, 3, 2, 1, 0])) ; h[:, torch.arange(5, -1, -1)] ; "
            "torch.logcumsumexp(h, 1) ; h.cummax(1).values + h ; F.pad(h, (1, 0))[:, 1:] ; h.unfold(1, 2, 1).mean(-1).repeat(1, 2)[:, :6] ; "
            "torch.take_along_dim(h, x.argsort(1), 1) ; h.repeat_interleave(2, 1)[:, ::2] ; torch.kron(h, torch.ones(1, 2, dtype=h.dtype))[:, ::2] ; "
            "h.index_add(0, torch.zeros(len(h), dtype=torch.long), x) ; torch.einsum('bi,bj->bij', h, x).mean(1) ; h.expand(2, -1, -1).prod(0) ; "
            "F.interpolate(h[:, None], scale_factor=2)[:, 0, ::2] ; h.logsumexp(0) + h ; h - h.amax(0) ; h * h.std(0) ; h.prod(1, keepdim=True) + h ; "
            "torch.searchsorted(torch.tensor([-0.5, 0.5], dtype=h.dtype), h.detach()) * h ; torch.bucketize(x, torch.tensor([0.0], dtype=x.dtype)) + h»"
        ),
    ),
    Piece(
        name="modules in a list",
        init="self.l{i} = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])\nself.s{i} = nn.ParameterList([nn.Parameter(torch.ones(6)) for _ in range(2)])",
        forward="for layer, scale in zip(self.l{i}, self.s{i}):\n    h = «h + torch.tanh(layer(h)) * scale ; F.relu(layer(h)) + scale»",
    ),
    Piece(
        name="cached tensor",
        top="@functools.lru_cache\ndef table{i}(n):\n    return torch.sin(torch.arange(n, dtype=torch.float64))[:, None]",
        init="self.c{i} = {}",
        forward=(
            "«if len(h) not in self.c{i}:\n    self.c{i}[len(h)] = torch.arange(len(h), dtype=h.dtype)[:, None]\nh = h + 0.1 * self.c{i}[len(h)]"
            " ; h = h + table{i}(len(h))"
            " ; if not hasattr(self, 'pe{i}'):\n    self.pe{i} = torch.linspace(0, 1, 6, dtype=h.dtype)\nh = h + self.pe{i}»"
        ),
    ),
    Piece(
        name="pruned",
        init="self.l{i} = prune.«l1_unstructured(nn.Linear(6, 6), 'weight', 0.3) ; random_unstructured(nn.Linear(6, 6), 'weight', 0.3)»",
        forward="h = self.l{i}(h)",
    ),
    Piece(
        name="stochastic depth",
        init="self.l{i}, self.q = nn.Linear(6, 6), q",
        forward="if self.training:\n    h = h + torch.tanh(self.l{i}(h)) * (torch.rand(«() ; (len(h), 1)») > self.q['p'])\nelse:\n    h = h + (1 - self.q['p']) * torch.tanh(self.l{i}(h))",
    ),
]
