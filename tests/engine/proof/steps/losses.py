"""What a step makes of the batch before it calls the network, its main loss, and how it ends."""

from __future__ import annotations

from tests.engine.proof.steps.piece import Piece

INPUTS: list[Piece] = [
    Piece(
        name="noise on the input",
        before="x = x + «0.1 ; q['w']» * torch.randn_like(x)",
        plain=True,
    ),
    Piece(
        name="mixup",
        before="""
            «
                lam = 0.7 ; lam = q['p'] ; lam = torch.rand((), dtype=x.dtype) ;
                lam = distributions.Beta(*torch.tensor([0.4, 0.4], dtype=x.dtype)).sample()
            »
            other = torch.randperm(len(x))
            x = lam * x + (1 - lam) * x[other]
        """,
        plain=True,
    ),
    Piece(
        name="augmentation",
        before="""
            «
                x = torch.where(torch.rand(len(x), 1) < 0.5, -x, x) ; x = x * (torch.rand(x.shape) > q['p']) ;
                x = x.roll(1, 1) ; x = x - x.mean(0) ; x = torch.cat([x[:, :3], -x[:, 3:]], 1)
            »
        """,
        plain=True,
    ),
    Piece(
        name="label noise",
        before="y = torch.where(torch.rand(len(y)) < «0.2 ; q['p']», torch.randint(0, 3, y.shape), y)",
        plain=True,
    ),
    Piece(
        name="input in place",
        before="""
            «
                x = x.clone(); x[:, 0] = 0.0 ; x.clamp_(-2.0, 2.0) ; x *= 0.5 ; x[:, 1].zero_() ;
                y = y.clone(); y[0] = 0
            »
        """,
    ),
    Piece(
        name="fewer rows",
        before="""
            rows = torch.randperm(len(x))[: len(x) - 1]
            x, y = x[rows], y[rows]
        """,
    ),
    Piece(
        name="sorted rows",
        before="""
            rows = x[:, 0].argsort()
            x, y = x[rows], y[rows]
        """,
        plain=True,
    ),
    Piece(
        name="chance in python",
        state="rng = «random.Random(q['k']) ; np.random.default_rng(q['k'])»",
        before="""
            if rng.random() < 0.5:
                x = -x
        """,
    ),
    Piece(
        name="generator of its own",
        state="gen = torch.Generator().manual_seed(q['k'])",
        before="x = x + 0.1 * torch.randn(x.shape, dtype=x.dtype, generator=gen)",
    ),
    Piece(
        name="chance in torch",
        before="""
            if torch.rand(()) < 0.5:
                x = -x
        """,
    ),
    Piece(
        name="weights clipped",
        before="""
            with torch.no_grad():
                for p in model.parameters():
                    p.«clamp_(-0.4, 0.4) ; data.clamp_(-0.4, 0.4) ; mul_(0.98)»
        """,
    ),
    Piece(
        name="unfrozen later",
        state="n = 0",
        before="""
            nonlocal n
            n += 1
            for p in model.first.parameters():
                «p.requires_grad = n > 2 ; p.requires_grad_(n % 2 == 0)»
        """,
    ),
    Piece(
        name="frozen in the step",
        before="model.first.requires_grad_(False)",
    ),
    Piece(
        name="modes",
        init="""
            self.z{i} = nn.BatchNorm1d(6)
            self.d{i} = nn.Dropout(0.2)
        """,
        forward="h = self.d{i}(self.z{i}(h))",
        before="""
            «
                model.z{i}.eval() ; model.d{i}.train() ; model.d{i}.p = 0.4 ; model.z{i}.momentum = 0.5 ;
                model.z{i}.training = len(x) > 4
            »
        """,
    ),
    Piece(
        name="input statistics",
        init="self.register_buffer('m{i}', torch.zeros(6))",
        before="""
            if model.training:
                model.m{i} «= 0.9 * model.m{i} + 0.1 * x.mean(0) ; += 0.1 * x.mean(0)»
            x = x - model.m{i}
        """,
        plain=True,
    ),
]

LOSSES: list[Piece] = [
    Piece(
        name="cross entropy",
        loss="loss = F.cross_entropy(out, y« ; , label_smoothing=0.1»)",
        plain=True,
    ),
    Piece(
        name="cross entropy, weights",
        loss="""
            loss = F.cross_entropy(out, y, weight=torch.tensor([1.0, 2.0, 0.5], dtype=out.dtype)«
                ; , reduction='sum'
            »)
        """,
        plain=True,
    ),
    Piece(
        name="loss module",
        state="""
            weight = torch.tensor([1.0, q['t'], 0.5], dtype=torch.float64)
            criterion = nn.CrossEntropyLoss(weight=weight, label_smoothing=«0.0 ; 0.1»)
        """,
        loss="loss = criterion(out, y)",
        plain=True,
    ),
    Piece(
        name="nll",
        loss="loss = F.nll_loss(F.log_softmax(out / «2.0 ; q['t']», 1), y)",
        plain=True,
    ),
    Piece(
        name="regression",
        loss="""
            target = F.one_hot(y, 3).to(out.dtype)
            loss = F.«
                mse_loss(out, target) ; smooth_l1_loss(out, target, beta=0.3) ;
                huber_loss(out, target, delta=0.3) ; l1_loss(out, target) ;
                binary_cross_entropy_with_logits(out, target) ;
                gaussian_nll_loss(out, target, F.softplus(out) + 0.1) ;
                binary_cross_entropy(torch.sigmoid(out), target) ; soft_margin_loss(out, 2 * target - 1) ;
                mse_loss(out.softmax(1), target, reduction='sum')
            »
        """,
        plain=True,
    ),
    Piece(
        name="masked mean",
        loss="""
            each = F.cross_entropy(out, y, reduction='none')
            keep = x[:, 0] > «-0.5 ; q['c']»
            loss = (each * keep).sum() / keep.sum().clamp_min(1)
        """,
        plain=True,
    ),
    Piece(
        name="focal",
        loss="""
            each = F.cross_entropy(out, y, reduction='none')
            loss = ((1 - torch.exp(-each)) ** «2 ; q['t']» * each).mean()
        """,
        plain=True,
    ),
    Piece(
        name="hard examples",
        loss="""
            loss = F.cross_entropy(out, y, reduction='none').«
                topk(min(2, len(y))).values.mean() ; max() ; sort().values[:2].sum() ; median()
            »
        """,
        plain=True,
    ),
    Piece(
        name="ignored rows",
        loss="loss = F.cross_entropy(out, y.masked_fill(x[:, 1] > 1.0, -100), ignore_index=-100)",
        plain=True,
    ),
    Piece(
        name="contrastive",
        loss="""
            z = F.normalize(out, dim=1, eps=0.1)
            same = (z @ z.t() / «0.5 ; q['t']»).masked_fill(torch.eye(len(z), dtype=torch.bool), «
                -1e9 ; float('-inf')
            »)
            loss = F.cross_entropy(same, torch.arange(len(z)).roll(1))
        """,
        plain=True,
    ),
    Piece(
        name="distribution",
        loss="""
            target = F.one_hot(y, 3).to(out.dtype)
            d = «
                distributions.Categorical(logits=out); loss = -d.log_prob(y).mean() - 0.1 * d.entropy().mean() ;
                distributions.Categorical(probs=out.softmax(1)); loss = -d.log_prob(y).mean() ;
                distributions.Bernoulli(logits=out); loss = -d.log_prob(target).mean() ;
                distributions.Normal(out, 0.5); loss = -d.log_prob(target).mean() ;
                distributions.Normal(out, F.softplus(out) + 0.1); loss = -d.log_prob(target).mean()
            »
        """,
        plain=True,
    ),
    Piece(
        name="distribution, more kinds",
        loss="""
            target = F.one_hot(y, 3).to(out.dtype)
            d = «
                distributions.Independent(distributions.Normal(out, 1.0), 1); loss = -d.log_prob(target).mean() ;
                distributions.MultivariateNormal(out, torch.eye(3).double()); loss = -d.log_prob(target).mean() ;
                distributions.Dirichlet(F.softplus(out) + 0.5); loss = -d.log_prob(d.rsample().detach()).mean() ;
                distributions.Poisson(F.softplus(out)); loss = -d.log_prob(y[:, None].to(out.dtype)).mean() ;
                distributions.Normal(out, 1.0, validate_args=False); loss = -d.log_prob(y[:, None]).mean()
            »
        """,
    ),
    Piece(
        name="policy gradient",
        loss="""
            d = distributions.Categorical(logits=out)
            action = d.sample()
            reward = (action == y).to(out.dtype)
            loss = -(d.log_prob(action) * (reward - reward.mean())).mean() - «0.01 ; q['w']» * d.entropy().mean()
        """,
        plain=True,
    ),
    Piece(
        name="alternating losses",
        state="n = 0",
        loss="""
            nonlocal n
            n += 1
            if n % 2:
                loss = F.cross_entropy(out, y)
            else:
                loss = «out.pow(2).mean() ; h.pow(2).mean()»
        """,
    ),
    Piece(
        name="alternating by an iterator",
        state="turns = itertools.«cycle([0, 1, 1]) ; count()»",
        loss="loss = F.cross_entropy(out, y) if next(turns) % 2 == 0 else out.pow(2).mean()",
    ),
    Piece(
        name="alternating by a buffer",
        init="self.register_buffer('n{i}', torch.zeros((), dtype=torch.long))",
        loss="""
            model.n{i} += 1
            loss = torch.where(model.n{i} % 2 == 0, F.cross_entropy(out, y), out.pow(2).mean())
        """,
        plain=True,
    ),
    Piece(
        name="class by class",
        loss="""
            loss = sum(F.cross_entropy(out[y == c], y[y == c], reduction='sum') for c in range(3)) / len(y)
        """,
    ),
    Piece(
        name="scripted loss",
        top="""
            @torch.jit.script
            def ce{i}(out: Tensor, y: Tensor) -> Tensor:
                return -torch.log_softmax(out, 1).gather(1, y[:, None]).mean()
        """,
        loss="loss = ce{i}(out, y)",
    ),
    Piece(
        name="unused output",
        loss="""
            loss = F.cross_entropy(«model.head(x) ; model.head(x) + 0.0 * out ; out.detach() + model.head(x)», y)
        """,
    ),
]

LAST: list[Piece] = [
    Piece(
        name="logs",
        after="return loss, {'accuracy': (out.argmax(1) == y).double().mean(), 'norm': out.norm().detach()}",
        plain=True,
    ),
    Piece(
        name="logs with items",
        after="return loss, {'loss2': 2 * loss.item(), 'mean': float(out.mean()), 'rows': len(x)}",
    ),
    Piece(
        name="logs that need gradients",
        after="return loss, {'out': out.pow(2).mean(), 'weight': q['w'], 'h': h.std()}",
        plain=True,
    ),
    Piece(
        name="a list of losses",
        state="seen = []",
        after="""
            seen.append(«loss.detach() ; loss.item()»)
            return loss
        """,
    ),
    Piece(
        name="fails later",
        state="n = 0",
        after="""
            nonlocal n
            n += 1
            if n == 6 and q['k'] == 2:
                raise ValueError(f'this member fails on purpose at {n}')
            return loss
        """,
    ),
    Piece(
        name="diverges later",
        init="self.register_buffer('z{i}', torch.zeros(()))",
        after="""
            model.z{i} += 1
            return loss / (model.z{i} < 3 + q['k'])
        """,
    ),
    Piece(
        name="weights changed last",
        after="""
            if model.training:
                model.head.weight.data.«mul_(0.99) ; clamp_(-0.3, 0.3)»
            return loss
        """,
    ),
]
