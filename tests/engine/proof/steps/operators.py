"""Pieces inside the network that are one operator each: numbers as arguments, views, orders, draws."""

from __future__ import annotations

from tests.engine.proof.steps.piece import Piece

BLOCKS: list[Piece] = [
    Piece(
        name="a number as an argument",
        init="self.q = q",
        forward="""
            n = self.q[«'w' ; 't' ; 'p'»]
            h = «
                h * n ; h + n ; n - h ; h / n ; h.add(x, alpha=n) ; F.leaky_relu(h, n) ; F.elu(h, n) ;
                F.softplus(h, beta=n) ; F.celu(h, n) ; h.clamp(min=-n) ; h.clamp(-n, n) ; F.hardtanh(h, -n, n) ;
                h.abs() ** n ; n**h ; torch.lerp(h, x, n) ; h.masked_fill(x > 0, n) ; torch.where(x > 0, h, n) ;
                torch.full_like(h, n) * h ; F.layer_norm(h, (6,), eps=n) ; torch.addcmul(h, x, h, value=n) ;
                F.threshold(h, n, -n) ; h.new_full((6,), n) * h ; h * torch.tensor(n, dtype=h.dtype) ;
                h - h.quantile(n / 3, dim=1, keepdim=True) ; F.normalize(h, p=1 + n, dim=1, eps=0.1) ;
                F.dropout(h, n / 3, self.training) ; torch.logaddexp(h, h.new_tensor(n)) ;
                F.rrelu(h, 0.1, 0.1 + n, self.training) ; h.renorm(2, 0, n) ;
                torch.maximum(h, torch.as_tensor(n, dtype=h.dtype)) ; F.hardshrink(h, n / 4) ;
                F.softshrink(h, n / 4) ; torch.nan_to_num(h, n) ; h % n ;
                torch.atan2(h, torch.full((), n, dtype=h.dtype)) ; F.rms_norm(h, (6,), eps=n)
            »
        """,
        plain=True,
    ),
    Piece(
        name="a whole number as an argument",
        init="self.q = q",
        forward="""
            k = self.q['k']
            h = «
                h.roll(k, 1) ; h * k ; h**k ; torch.cat([h[:, k:], h[:, :k]], 1) ; h.clone().fill_diagonal_(k) ;
                h - h.topk(k, 1).values[:, -1:] ; h + h[:, k : k + 1] ; F.pad(h, (k, 0))[:, :6] ;
                h.cumsum(1) / k ; torch.stack([h] * k).mean(0) ; h.repeat(1, k)[:, :6] ;
                h.kthvalue(k, dim=1, keepdim=True).values + h ; h.tril(k) + x ;
                h + F.one_hot(torch.arange(len(h)) % k, 6) ; h.diff(n=k, dim=1, append=x[:, :k]) ;
                F.group_norm(h, k)
            »
        """,
        plain=True,
    ),
    Piece(
        name="a draw with a number",
        init="self.q = q",
        forward="""
            n = self.q[«'w' ; 'p'»]
            if self.training:
                h = h + 0.1 * «
                    torch.normal(torch.zeros_like(h), n) ; torch.normal(h.detach(), torch.full_like(h, n)) ;
                    torch.empty_like(h).uniform_(-n, n) ; torch.empty_like(h).normal_(n, n) ;
                    torch.bernoulli(torch.full_like(h, n)) ; torch.empty_like(h).bernoulli_(n) ;
                    torch.empty_like(h).exponential_(1 + n) ; torch.poisson(torch.full_like(h, n)) ;
                    torch.randint(0, 1 + self.q['k'], h.shape) ; torch.rand_like(h).pow(n) ;
                    torch.multinomial(h.softmax(1), 6, replacement=True) ;
                    torch.normal(n, 1.0, h.shape, dtype=h.dtype) ; torch.empty_like(h).log_normal_(0.0, n) ;
                    torch.randn(6, 6, dtype=h.dtype)[torch.randperm(6)][:1]
                »
        """,
        plain=True,
    ),
    Piece(
        name="view written in place",
        init="self.l{i} = nn.Linear(6, 6)",
        forward="""
            h = self.l{i}(h)
            «
                v = h[:, :3]; v.mul_(2.0) ; a, b = h[:, :3], h[:, 3:]; a += b ; h.view(-1, 2, 3)[:, 0].add_(1.0) ;
                h.t()[0] = 0.5 ; h[:, ::2] = x[:, ::2] ; h[1:] += h[:-1].clone() ; h.narrow(1, 0, 2).zero_() ;
                h.select(1, 2).tanh_() ; torch.add(h.detach(), x, out=torch.empty_like(h)) ;
                h.diagonal().fill_(0.1) ; h[0, 0] = 1.0 ; h.index_fill_(1, torch.tensor([0, 2]), 0.2)
            »
        """,
        plain=True,
    ),
    Piece(
        name="rearranged",
        forward="""
            h = «
                h.sort(1).values ; h.flip(1) + h ; h.cumsum(1) ; h.gather(1, x.argsort(1)) ;
                h.scatter(1, x.argsort(1), h) ; h.scatter_add(1, x.argsort(1), h) ;
                h.index_select(1, torch.tensor([5, 4, 3, 2, 1, 0])) ; h[:, torch.arange(5, -1, -1)] ;
                torch.logcumsumexp(h, 1) ; h.cummax(1).values + h ; F.pad(h, (1, 0))[:, 1:] ;
                h.unfold(1, 2, 1).mean(-1).repeat(1, 2)[:, :6] ; torch.take_along_dim(h, x.argsort(1), 1) ;
                h.repeat_interleave(2, 1)[:, ::2] ; torch.kron(h, torch.ones(1, 2, dtype=h.dtype))[:, ::2] ;
                h.index_add(0, torch.zeros(len(h), dtype=torch.long), x) ;
                torch.einsum('bi,bj->bij', h, x).mean(1) ; h.expand(2, -1, -1).prod(0) ;
                F.interpolate(h[:, None], scale_factor=2)[:, 0, ::2] ; h.logsumexp(0) + h ; h - h.amax(0) ;
                h * h.std(0) ; h.prod(1, keepdim=True) + h ;
                torch.searchsorted(torch.tensor([-0.5, 0.5], dtype=h.dtype), h.detach()) * h ;
                torch.bucketize(x, torch.tensor([0.0], dtype=x.dtype)) + h
            »
        """,
        plain=True,
    ),
]
