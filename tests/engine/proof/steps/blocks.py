"""Pieces inside the network, simplest first: layers, buffers, masks, noise."""

from __future__ import annotations

from tests.engine.proof.steps.piece import Piece

BLOCKS: list[Piece] = [
    Piece(
        name="linear",
        init="self.l{i} = nn.Linear(6, 6« ; , bias=False»)",
        forward="h = «torch.tanh ; F.relu ; F.gelu ; F.silu ; F.softplus ; torch.sigmoid»(self.l{i}(h))",
        plain=True,
    ),
    Piece(
        name="residual",
        init="self.l{i} = nn.Linear(6, 6)",
        forward="h = h + self.l{i}(h« ; .detach()»)",
        plain=True,
    ),
    Piece(
        name="dropout module",
        init="self.l{i} = nn.Dropout(«0.2 ; q['p']»)",
        forward="h = self.l{i}(h)",
        plain=True,
    ),
    Piece(
        name="dropout function",
        init="self.p{i} = «0.3 ; q['p']»",
        forward="h = F.«dropout ; alpha_dropout»(h, self.p{i}, training=«self.training ; True»)",
        plain=True,
    ),
    Piece(
        name="batch norm",
        init="self.l{i} = nn.BatchNorm1d(6« ; , momentum=0.3 ; , affine=False ; , momentum=None»)",
        forward="h = self.l{i}(h)",
        plain=True,
    ),
    Piece(
        name="batch norm, frozen",
        init="self.l{i} = nn.BatchNorm1d(6).eval()",
        forward="""
            «self.l{i}.eval() ; self.l{i}.training = False»
            h = self.l{i}(h)
        """,
        plain=True,
    ),
    Piece(
        name="batch norm by hand",
        init="""
            self.register_buffer('m{i}', torch.zeros(6))
            self.register_buffer('v{i}', torch.ones(6))
        """,
        forward="""
            h = F.batch_norm(h, self.m{i}, self.v{i}, training=«self.training ; True», momentum=«0.1 ; 0.5»)
        """,
        plain=True,
    ),
    Piece(
        name="norm",
        init="""
            self.l{i} = «nn.LayerNorm(6) ; nn.RMSNorm(6) ; nn.GroupNorm(2, 6) ; nn.LayerNorm(6, bias=False)»
        """,
        forward="h = self.l{i}(h)",
        plain=True,
    ),
    Piece(
        name="normalised",
        init="self.q = q",
        forward="""
            h = «
                F.normalize(h, dim=1, eps=0.1) ; h / (h.norm(dim=1, keepdim=True) + 0.5) ;
                h.clamp(-1.0, self.q['c'] + 1) ; h - h.mean(0, keepdim=True) ; h.softmax(1) ;
                torch.tanh(h / self.q['t'])
            »
        """,
        plain=True,
    ),
    Piece(
        name="running mean",
        init="self.register_buffer('m{i}', torch.zeros(6)« ; , persistent=False»)",
        forward="""
            if self.training:
                «
                    self.m{i}.mul_(0.9).add_(h.detach().mean(0), alpha=0.1) ;
                    self.m{i} = 0.9 * self.m{i} + 0.1 * h.detach().mean(0) ;
                    self.m{i}.lerp_(h.detach().mean(0), 0.2) ;
                    self.m{i}.copy_(0.5 * self.m{i} + 0.5 * h.detach().mean(0)) ;
                    self.m{i}[:3] += h.detach().mean(0)[:3]
                »
            h = h - self.m{i}
        """,
        plain=True,
    ),
    Piece(
        name="running mean under no_grad",
        init="self.register_buffer('m{i}', torch.zeros(6))",
        forward="""
            with torch.no_grad():
                self.m{i} «+= 0.1 * h.mean(0) ; = self.m{i} * 0.9 + h.mean(0)»
            h = h - self.m{i}
        """,
        plain=True,
    ),
    Piece(
        name="counter in a buffer",
        init="self.register_buffer('n{i}', torch.zeros((), dtype=torch.long))",
        forward="""
            «self.n{i} += 1 ; self.n{i}.add_(1) ; self.n{i} = self.n{i} + 1»
            h = «
                h / (1 + 0.1 * self.n{i}) ; torch.where(self.n{i} > 3, h, h.detach()) ;
                h.masked_fill(self.n{i} < 3, 0.5) ; h * torch.clamp(self.n{i} / 5.0, max=1.0) ;
                h * (self.n{i} % 2 == 0)
            »
        """,
        plain=True,
    ),
    Piece(
        name="mask",
        init="""
            self.register_buffer('k{i}', torch.arange(6) % 3 > 0)
            self.c{i} = «0.2 ; q['c']»
        """,
        forward="""
            h = «
                h * self.k{i} ; h.masked_fill(self.k{i}, 0.3) ; torch.where(h > self.c{i}, h, 0.1 * h) ;
                h.masked_fill(h > self.c{i}, 0.0) ; torch.where(self.k{i}, h, h.detach()) ; h * (x > self.c{i}) ;
                torch.where(x[:, :1] > 0, h, -h)
            »
        """,
        plain=True,
    ),
    Piece(
        name="in place",
        init="""
            self.l{i} = nn.Linear(6, 6)
            self.c{i} = q['c']
        """,
        forward="""
            h = self.l{i}(h)
            «
                h.mul_(0.5) ; h += x ; h.clamp_(-1.0, 1.0) ; F.relu(h, inplace=True) ;
                h.masked_fill_(h > self.c{i}, 0.0) ; h[:, 0] = 0.0 ; h[:, :2] *= 2.0 ;
                h.add_(torch.randn_like(h), alpha=0.1) ; h[0] = x[0] ; h.tanh_() ; h.sub_(h.mean(0)) ;
                h[:, 1] = h[:, 2]
            »
        """,
        plain=True,
    ),
    Piece(
        name="noise",
        init="self.w{i} = «0.1 ; q['w']»",
        forward="""
            if self.training:
                h = h + self.w{i} * «
                    torch.randn_like(h) ; torch.rand_like(h) ; torch.randn(h.shape, dtype=h.dtype) ;
                    torch.empty_like(h).normal_() ; torch.bernoulli(torch.sigmoid(h)) ;
                    torch.rand(len(h), 1, dtype=h.dtype) ; torch.randn(6, dtype=h.dtype)
                »
        """,
        plain=True,
    ),
    Piece(
        name="own dropout",
        init="self.p{i} = «0.2 ; q['p']»",
        forward="""
            if self.training:
                h = h * (torch.rand_like(h) > self.p{i})« ; / (1 - self.p{i})»
        """,
        plain=True,
    ),
    Piece(
        name="recurrent",
        init="self.l{i} = nn.«LSTM ; GRU ; RNN»(3, 3, batch_first=True« ; , num_layers=2, dropout=0.3»)",
        forward="h = self.l{i}(h.view(len(h), 2, 3))[0].flatten(1)",
        plain=True,
    ),
    Piece(
        name="attention",
        init="""
            self.l{i} = nn.MultiheadAttention(6, 2, «dropout=0.0 ; dropout=0.2 ; bias=False», batch_first=True)
        """,
        forward="""
            s = torch.stack([h, x, h * x], 1)
            «mask = None ; mask = torch.stack([x[:, 0] > 9, x[:, 1] > 0, x[:, 2] > 0], 1)»
            h = self.l{i}(s, s, s, key_padding_mask=mask« ; , need_weights=False»)[0].mean(1)
        """,
        plain=True,
    ),
    Piece(
        name="transformer",
        init="""
            self.l{i} = nn.TransformerEncoderLayer(6, 2, 8, «0.0 ; 0.1», batch_first=True« ; , norm_first=True»)
        """,
        forward="""
            s = torch.stack([h, x, h * x], 1)
            mask = torch.stack([x[:, 0] > 9, x[:, 1] > 0, x[:, 2] > 0], 1)
            h = self.l{i}(s« ; , src_key_padding_mask=mask»)[:, 0]
        """,
        plain=True,
    ),
    Piece(
        name="embedding",
        init="self.l{i} = nn.Embedding(5, 6« ; , padding_idx=0»)",
        forward="h = h + self.l{i}((x[:, :3].abs() * 2).long().clamp(max=4)).mean(1)",
        plain=True,
    ),
    Piece(
        name="embedding bag",
        init="self.l{i} = nn.EmbeddingBag(5, 6« ; , mode='sum' ; , mode='max'»)",
        forward="h = h + self.l{i}((x[:, :3].abs() * 2).long().clamp(max=4))",
        plain=True,
    ),
    Piece(
        name="convolution",
        init="self.l{i} = nn.Conv1d(1, 2, 3, padding=1« ; , padding_mode='circular'»)",
        forward="h = «F.max_pool1d ; F.avg_pool1d»(self.l{i}(h[:, None]), 2).flatten(1)",
        plain=True,
    ),
    Piece(
        name="experts",
        init="self.g{i}, self.l{i} = nn.Linear(6, 3), nn.Parameter(torch.randn(3, 6, 6) * 0.3)",
        forward="""
            w = self.g{i}(h).softmax(1)
            «pass ; top = w.topk(2); w = torch.zeros_like(w).scatter(1, top.indices, top.values)»
            h = torch.einsum('bi,eij,be->bj', h, self.l{i}, w)
        """,
        plain=True,
    ),
    Piece(
        name="weight norm",
        init="self.l{i} = parametrizations.weight_norm(nn.Linear(6, 6))",
        forward="h = self.l{i}(h)",
        plain=True,
    ),
    Piece(
        name="tied weights",
        init="""
            self.l{i}, self.k{i} = nn.Linear(6, 6), nn.Linear(6, 6)
            «self.k{i}.weight = self.l{i}.weight ; pass»
        """,
        forward="h = F.linear(torch.tanh(self.l{i}(h)), «self.k{i}.weight ; self.l{i}.weight.t()»)",
        plain=True,
    ),
    Piece(
        name="shape",
        forward="""
            «if len(h) > 4: ; if h.shape[0] % 2: ; for _ in range(min(2, len(h))): ; if self.training:»
                h = h * 1.5
        """,
        plain=True,
    ),
    Piece(
        name="two passes",
        init="self.l{i}, self.q = nn.Linear(6, 6), q",
        forward="""
            for _ in range(«2 ; self.q['k']»):
                h = torch.tanh(self.l{i}(h)« ; + h.detach()»)
        """,
        plain=True,
    ),
    Piece(
        name="modules in a list",
        init="""
            self.l{i} = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
            self.s{i} = nn.ParameterList([nn.Parameter(torch.ones(6)) for _ in range(2)])
        """,
        forward="""
            for layer, scale in zip(self.l{i}, self.s{i}):
                h = «h + torch.tanh(layer(h)) * scale ; F.relu(layer(h)) + scale»
        """,
        plain=True,
    ),
    Piece(
        name="cached tensor",
        top="""
            @functools.lru_cache
            def table{i}(n):
                return torch.sin(torch.arange(n, dtype=torch.float64))[:, None]
        """,
        init="self.c{i} = {}",
        forward="""
            «
            if len(h) not in self.c{i}:
                self.c{i}[len(h)] = torch.arange(len(h), dtype=h.dtype)[:, None]
            h = h + 0.1 * self.c{i}[len(h)]
            ;
            h = h + table{i}(len(h))
            ;
            if not hasattr(self, 'pe{i}'):
                self.pe{i} = torch.linspace(0, 1, 6, dtype=h.dtype)
            h = h + self.pe{i}
            »
        """,
        plain=True,
    ),
    Piece(
        name="pruned",
        init="""
            self.l{i} = prune.«
                l1_unstructured(nn.Linear(6, 6), 'weight', 0.3) ;
                random_unstructured(nn.Linear(6, 6), 'weight', 0.3)
            »
        """,
        forward="h = self.l{i}(h)",
        plain=True,
    ),
    Piece(
        name="stochastic depth",
        init="self.l{i}, self.q = nn.Linear(6, 6), q",
        forward="""
            if self.training:
                h = h + torch.tanh(self.l{i}(h)) * (torch.rand(«() ; (len(h), 1)») > self.q['p'])
            else:
                h = h + (1 - self.q['p']) * torch.tanh(self.l{i}(h))
        """,
        plain=True,
    ),
]
