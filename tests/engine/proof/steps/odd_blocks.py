"""Pieces inside the network that are less usual: gradient modes, hooks, own functions, python state."""

from __future__ import annotations

from tests.engine.proof.steps.piece import Piece

BLOCKS: list[Piece] = [
    Piece(
        name="parametrization",
        top="""
            class Symmetric{i}(nn.Module):
                def forward(self, w):
                    return w.triu() + w.triu(1).t()
        """,
        init="""
            self.l{i} = nn.Linear(6, 6)
            «
                parametrize.register_parametrization(self.l{i}, 'weight', Symmetric{i}()) ;
                parametrizations.spectral_norm(self.l{i}) ; parametrizations.orthogonal(self.l{i}) ;
                torch.nn.utils.weight_norm(self.l{i}) ; torch.nn.utils.spectral_norm(self.l{i})
            »
        """,
        forward="h = self.l{i}(h)",
    ),
    Piece(
        name="complex",
        init="self.c{i} = nn.Parameter(torch.randn(3, 3, dtype=torch.complex128) * 0.5)",
        forward="""
            z = torch.complex(h[:, :3], h[:, 3:]) «@ self.c{i} ; * self.c{i}[0] ; @ self.c{i}.conj().t()»
            h = «
                torch.view_as_real(z).flatten(1) ; torch.cat([z.real, z.abs()], 1) ;
                torch.cat([(z * z.conj()).real, z.angle()], 1)
            »
        """,
    ),
    Piece(
        name="fourier",
        init="self.f{i} = nn.Parameter(torch.ones(4))",
        forward="""
            h = «torch.fft.irfft(torch.fft.rfft(h) * self.f{i}, n=6) ; torch.fft.fft(h).real * self.f{i}[0]»
        """,
    ),
    Piece(
        name="fake quantisation",
        forward="""
            scale, zero = torch.full((6,), 0.1), torch.zeros(6, dtype=torch.int32)
            h = 0.3 * h + «
                torch.fake_quantize_per_tensor_affine(h, 0.1, 0, -20, 20) ;
                h + 0.5 * (torch.round(h * 8) / 8 - h).detach() ;
                torch.fake_quantize_per_channel_affine(h, scale, zero, 1, -8, 7)
            »
        """,
    ),
    Piece(
        name="observer",
        init="""
            self.l{i} = torch.ao.quantization.FakeQuantize(observer=torch.ao.quantization.MovingAverageMinMaxObserver)
        """,
        forward="h = 0.3 * h + self.l{i}(h)",
    ),
    Piece(
        name="detached recurrence",
        init="self.l{i} = nn.«GRUCell ; RNNCell»(3, 3)",
        forward="""
            s = torch.zeros(len(h), 3, dtype=h.dtype)
            for t in range(2):
                s = self.l{i}(h.view(len(h), 2, 3)[:, t], s« ; .detach()»)
            h = torch.cat([s, h[:, 3:]], 1)
        """,
    ),
    Piece(
        name="hidden state kept between steps",
        init="self.s{i} = «None ; torch.zeros(6, dtype=torch.float64)»",
        forward="""
            h = h if self.s{i} is None else h + 0.5 * self.s{i}
            self.s{i} = h.detach().mean(0)
        """,
    ),
    Piece(
        name="counter in an attribute",
        init="self.n{i} = 0",
        forward="""
            self.n{i} += 1
            h = «h * min(1.0, self.n{i} / 4) ; (h if self.n{i} % 2 else h.detach()) ; h / self.n{i}»
        """,
    ),
    Piece(
        name="linear algebra",
        init="self.c{i} = q['c']",
        forward="""
            k = h.t() @ h / len(h)
            h = h @ «
                torch.linalg.inv(k + torch.eye(6, dtype=h.dtype)) ;
                torch.linalg.solve(k + torch.eye(6, dtype=h.dtype), k) ;
                torch.linalg.cholesky(k + torch.eye(6, dtype=h.dtype)) ; torch.matrix_exp(-k) ;
                torch.linalg.pinv(k + 0.5 * torch.eye(6, dtype=h.dtype))
            »
        """,
    ),
    Piece(
        name="try cholesky",
        init="self.c{i} = 0.3 * q['c']",
        forward="""
            k = h.t() @ h / len(h) - self.c{i} * torch.eye(6, dtype=h.dtype)
            try:
                h = h @ torch.linalg.cholesky(k)
            except RuntimeError:
                h = h @ torch.linalg.cholesky(k + 2 * torch.eye(6, dtype=h.dtype))
        """,
    ),
    Piece(
        name="embedding with max_norm",
        init="self.l{i} = nn.Embedding(5, 6, max_norm=1.0)",
        forward="h = h + self.l{i}((x[:, 0].abs() * 2).long().clamp(max=4))",
    ),
    Piece(
        name="branch on values",
        forward="""
            «if h.mean() > 0: ; if x[0, 0].item() > 0: ; if (h.abs() > 0.9).any(): ; while h.abs().max() > 2:»
                h = 0.5 * h
        """,
    ),
    Piece(
        name="rows by a mask",
        forward="""
            keep = x[:, 0] > 0
            «
                h = h.clone(); h[keep] = 0.5 * h[keep] ; h = h.index_fill(0, keep.nonzero()[:, 0], 0.1) ;
                h = h * keep[:, None]
            »
        """,
    ),
    Piece(
        name="codebook",
        init="self.register_buffer('e{i}', torch.randn(4, 6))",
        forward="""
            near = «torch.cdist(h, self.e{i}) ; (h[:, None] - self.e{i}).pow(2).sum(-1)».argmin(1)
            if self.training:
                with torch.no_grad():
                    «
                        self.e{i}.index_add_(0, near, h, alpha=0.05) ;
                        self.e{i}[near] = 0.9 * self.e{i}[near] + 0.1 * h.mean(0) ;
                        self.e{i} = self.e{i} + 0.1 * F.one_hot(near, 4).to(h.dtype).t() @ h
                    »
            h = h + 0.5 * (self.e{i}[near] - h).detach()
        """,
    ),
    Piece(
        name="running mean that keeps its graph",
        init="self.register_buffer('m{i}', torch.zeros(6))",
        forward="""
            self.m{i} = (0.5 * self.m{i} + 0.5 * h.mean(0))« ; .detach()»
            h = h - self.m{i}
            self.m{i} = self.m{i}.detach()
        """,
    ),
    Piece(
        name="sampled in forward",
        init="self.l{i} = nn.Linear(6, 6)",
        forward="""
            d = distributions.«
                Normal(h, F.softplus(self.l{i}(h)) + 0.1) ; Laplace(h, F.softplus(self.l{i}(h)) + 0.1) ;
                RelaxedBernoulli(torch.tensor(0.7, dtype=h.dtype), logits=self.l{i}(h)) ;
                Gamma(F.softplus(h) + 0.5, F.softplus(self.l{i}(x)) + 0.5)
            »
            h = d.rsample()
        """,
    ),
    Piece(
        name="packed sequence",
        init="self.l{i} = nn.«GRU ; LSTM»(3, 3, batch_first=True)",
        forward="""
            lengths = (x[:, 0] > 0).long() + 1
            s = nn.utils.rnn.pack_padded_sequence(h.view(len(h), 2, 3), lengths, batch_first=True, enforce_sorted=False)
            h = nn.utils.rnn.pad_packed_sequence(self.l{i}(s)[0], batch_first=True, total_length=2)[0].flatten(1)
        """,
    ),
    Piece(
        name="buffer that changes its shape",
        init="self.register_buffer('b{i}', torch.zeros(1, 6))",
        forward="""
            if self.training:
                self.b{i} = torch.cat([self.b{i}, h.detach()[:1]])« ; [-4:]»
            h = h - self.b{i}.mean(0)
        """,
    ),
    Piece(
        name="buffer that is another name",
        init="""
            self.l{i} = nn.Linear(6, 6)
            self.register_buffer('b{i}', «torch.zeros(6, 6) ; self.l{i}.weight.detach().clone()»)
        """,
        forward="""
            «
                self.b{i} = self.l{i}.weight.detach() ; self.b{i} = self.l{i}.weight.detach().clone() ;
                self.b{i} = self.l{i}.weight.data.t()
            »
            h = self.l{i}(h) + F.linear(h, self.b{i})
        """,
    ),
    Piece(
        name="two buffers change places",
        init="""
            self.register_buffer('a{i}', torch.zeros(6))
            self.register_buffer('b{i}', torch.ones(6))
        """,
        forward="""
            self.a{i}, self.b{i} = «
                self.b{i}, self.a{i} ; self.b{i}, h.detach().mean(0) ; self.b{i} * 0.9, self.a{i} + 0.1
            »
            h = h + 0.1 * self.a{i}
        """,
    ),
    Piece(
        name="numpy",
        init="self.q = q",
        forward="""
            h = «
                h * torch.from_numpy(np.linspace(0.5, 1.5, 6)) ; h + float(np.sin(self.q['w'])) ;
                h * torch.tensor(np.float64(self.q['t'])) ; h + torch.from_numpy(x.detach().numpy().clip(-1, 1)) ;
                h * np.float64(0.5) ; h + float(h.detach().mean())
            »
        """,
    ),
    Piece(
        name="mode changed in forward",
        init="self.l{i} = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.BatchNorm1d(6))",
        forward="""
            before = self.l{i}.training
            self.l{i}.«eval() ; train(False)»
            g = self.l{i}(h)
            self.l{i}.train(before)
            h = «g + self.l{i}(h) ; self.l{i}(h) + g.detach()»
        """,
    ),
    Piece(
        name="logging",
        top="""
            import logging, warnings
            LOG{i} = logging.getLogger('drawn')
        """,
        forward="""
            «
                LOG{i}.debug('mean %s', h.shape) ; warnings.warn('drawn', stacklevel=2) ; assert h.shape[1] == 6 ;
                assert torch.isfinite(h).all() ; torch._assert(h.shape[1] == 6, 'six')
            »
        """,
    ),
    Piece(
        name="layer chosen by a number",
        init="""
            self.l{i} = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6, bias=False), nn.Identity()])
            self.k{i} = q['k'] - 1
        """,
        forward="h = torch.tanh(self.l{i}[self.k{i}](h))",
    ),
    Piece(
        name="weights from a network",
        init="self.l{i} = nn.Linear(6, 36)",
        forward="""
            h = «
                torch.bmm(self.l{i}(x).view(-1, 6, 6), h[:, :, None])[:, :, 0] ;
                F.linear(h, self.l{i}(x.mean(0)).view(6, 6)) ;
                torch.einsum('bij,bj->bi', self.l{i}(x).view(-1, 6, 6), h)
            »
        """,
    ),
    Piece(
        name="seeded in forward",
        forward="""
            «
            torch.manual_seed(3)
            h = h + 0.1 * torch.randn_like(h)
            ;
            with torch.random.fork_rng():
                torch.manual_seed(3)
                h = h + 0.1 * torch.randn_like(h)
            »
        """,
    ),
]
