"""Pieces of the step around the network: what happens to the batch, losses, what is added to them, what comes last."""

from __future__ import annotations

from tests.pack.step_piece import Piece

INPUTS: list[Piece] = [
    Piece(name="noise on the input", before="x = x + «0.1 ; q['w']» * torch.randn_like(x)", plain=True),
    Piece(
        name="mixup",
        before=(
            "«lam = 0.7 ; lam = q['p'] ; lam = torch.rand((), dtype=x.dtype) ; "
            "lam = torch.distributions.Beta(torch.tensor(0.4, dtype=x.dtype), torch.tensor(0.4, dtype=x.dtype)).sample()»\n"
            "other = torch.randperm(len(x))\nx = lam * x + (1 - lam) * x[other]"
        ),
        plain=True,
    ),
    Piece(
        name="augmentation",
        before=(
            "«x = torch.where(torch.rand(len(x), 1) < 0.5, -x, x) ; x = x * (torch.rand(x.shape) > q['p']) ; "
            "x = x.roll(1, 1) ; x = x - x.mean(0) ; x = torch.cat([x[:, :3], -x[:, 3:]], 1)»"
        ),
        plain=True,
    ),
    Piece(
        name="label noise",
        before="y = torch.where(torch.rand(len(y)) < «0.2 ; q['p']», torch.randint(0, 3, y.shape), y)",
        plain=True,
    ),
    Piece(
        name="input in place",
        before="«x = x.clone(); x[:, 0] = 0.0 ; x.clamp_(-2.0, 2.0) ; x *= 0.5 ; x[:, 1].zero_() ; y = y.clone(); y[0] = 0»",
    ),
    Piece(name="fewer rows", before="rows = torch.randperm(len(x))[: len(x) - 1]\nx, y = x[rows], y[rows]"),
    Piece(name="sorted rows", before="rows = x[:, 0].argsort()\nx, y = x[rows], y[rows]", plain=True),
    Piece(
        name="chance in python",
        state="rng = «random.Random(q['k']) ; np.random.default_rng(q['k'])»",
        before="if rng.random() < 0.5:\n    x = -x",
    ),
    Piece(
        name="generator of its own",
        state="gen = torch.Generator().manual_seed(q['k'])",
        before="x = x + 0.1 * torch.randn(x.shape, dtype=x.dtype, generator=gen)",
    ),
    Piece(name="chance in torch", before="if torch.rand(()) < 0.5:\n    x = -x"),
    Piece(
        name="weights clipped",
        before=(
            "with torch.no_grad():\n    for p in model.parameters():\n        p.«clamp_(-0.4, 0.4) ; data.clamp_(-0.4, 0.4) ; mul_(0.98)»"
        ),
    ),
    Piece(
        name="unfrozen later",
        state="n = 0",
        before=(
            "nonlocal n\nn += 1\nfor p in model.first.parameters():\n    «p.requires_grad = n > 2 ; p.requires_grad_(n % 2 == 0)»"
        ),
    ),
    Piece(name="frozen in the step", before="model.first.requires_grad_(False)"),
    Piece(
        name="modes",
        init="self.z{i} = nn.BatchNorm1d(6)\nself.d{i} = nn.Dropout(0.2)",
        forward="h = self.d{i}(self.z{i}(h))",
        before="«model.z{i}.eval() ; model.d{i}.train() ; model.d{i}.p = 0.4 ; model.z{i}.momentum = 0.5 ; model.z{i}.training = len(x) > 4»",
    ),
    Piece(
        name="input statistics",
        init="self.register_buffer('m{i}', torch.zeros(6))",
        before="if model.training:\n    model.m{i} «= 0.9 * model.m{i} + 0.1 * x.mean(0) ; += 0.1 * x.mean(0)»\nx = x - model.m{i}",
        plain=True,
    ),
]

LOSSES: list[Piece] = [
    Piece(name="cross entropy", loss="loss = F.cross_entropy(out, y« ; , label_smoothing=0.1»)", plain=True),
    Piece(
        name="cross entropy, weights",
        loss="loss = F.cross_entropy(out, y, weight=torch.tensor([1.0, 2.0, 0.5], dtype=out.dtype)« ; , reduction='sum'»)",
        plain=True,
    ),
    Piece(
        name="loss module",
        state="criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, q['t'], 0.5], dtype=torch.float64), label_smoothing=«0.0 ; 0.1»)",
        loss="loss = criterion(out, y)",
        plain=True,
    ),
    Piece(name="nll", loss="loss = F.nll_loss(F.log_softmax(out / «2.0 ; q['t']», 1), y)", plain=True),
    Piece(
        name="regression",
        loss=(
            "target = F.one_hot(y, 3).to(out.dtype)\n"
            "loss = F.«mse_loss(out, target) ; smooth_l1_loss(out, target, beta=0.3) ; huber_loss(out, target, delta=0.3) ; "
            "l1_loss(out, target) ; binary_cross_entropy_with_logits(out, target) ; gaussian_nll_loss(out, target, F.softplus(out) + 0.1) ; "
            "binary_cross_entropy(torch.sigmoid(out), target) ; soft_margin_loss(out, 2 * target - 1) ; mse_loss(out.softmax(1), target, reduction='sum')»"
        ),
        plain=True,
    ),
    Piece(
        name="masked mean",
        loss=(
            "each = F.cross_entropy(out, y, reduction='none')\nkeep = x[:, 0] > «-0.5 ; q['c']»\n"
            "loss = (each * keep).sum() / keep.sum().clamp_min(1)"
        ),
        plain=True,
    ),
    Piece(
        name="focal",
        loss="each = F.cross_entropy(out, y, reduction='none')\nloss = ((1 - torch.exp(-each)) ** «2 ; q['t']» * each).mean()",
        plain=True,
    ),
    Piece(
        name="hard examples",
        loss="loss = F.cross_entropy(out, y, reduction='none').«topk(min(2, len(y))).values.mean() ; max() ; sort().values[:2].sum() ; median()»",
        plain=True,
    ),
    Piece(
        name="ignored rows",
        loss="loss = F.cross_entropy(out, y.masked_fill(x[:, 1] > 1.0, -100), ignore_index=-100)",
        plain=True,
    ),
    Piece(
        name="contrastive",
        loss=(
            "z = F.normalize(out, dim=1, eps=0.1)\n"
            "same = (z @ z.t() / «0.5 ; q['t']»).masked_fill(torch.eye(len(z), dtype=torch.bool), «-1e9 ; float('-inf')»)\n"
            "loss = F.cross_entropy(same, torch.arange(len(z)).roll(1))"
        ),
        plain=True,
    ),
    Piece(
        name="distribution",
        loss=(
            "d = «torch.distributions.Categorical(logits=out); loss = -d.log_prob(y).mean() - 0.1 * d.entropy().mean()"
            " ; torch.distributions.Categorical(probs=out.softmax(1)); loss = -d.log_prob(y).mean()"
            " ; torch.distributions.Bernoulli(logits=out); loss = -d.log_prob(F.one_hot(y, 3).to(out.dtype)).mean()"
            " ; torch.distributions.Normal(out, 0.5); loss = -d.log_prob(F.one_hot(y, 3).to(out.dtype)).mean()"
            " ; torch.distributions.Normal(out, F.softplus(out) + 0.1); loss = -d.log_prob(F.one_hot(y, 3).to(out.dtype)).mean()»"
        ),
        plain=True,
    ),
    Piece(
        name="distribution, more kinds",
        loss=(
            "d = «torch.distributions.Independent(torch.distributions.Normal(out, 1.0), 1); loss = -d.log_prob(F.one_hot(y, 3).to(out.dtype)).mean()"
            " ; torch.distributions.MultivariateNormal(out, torch.eye(3, dtype=out.dtype)); loss = -d.log_prob(F.one_hot(y, 3).to(out.dtype)).mean()"
            " ; torch.distributions.Dirichlet(F.softplus(out) + 0.5); loss = -d.log_prob(d.rsample().detach()).mean()"
            " ; torch.distributions.Poisson(F.softplus(out)); loss = -d.log_prob(y[:, None].to(out.dtype)).mean()"
            " ; torch.distributions.Normal(out, 1.0, validate_args=False); loss = -d.log_prob(y[:, None]).mean()»"
        ),
    ),
    Piece(
        name="policy gradient",
        loss=(
            "d = torch.distributions.Categorical(logits=out)\naction = d.sample()\nreward = (action == y).to(out.dtype)\n"
            "loss = -(d.log_prob(action) * (reward - reward.mean())).mean() - «0.01 ; q['w']» * d.entropy().mean()"
        ),
        plain=True,
    ),
    Piece(
        name="alternating losses",
        state="n = 0",
        loss="nonlocal n\nn += 1\nif n % 2:\n    loss = F.cross_entropy(out, y)\nelse:\n    loss = «out.pow(2).mean() ; h.pow(2).mean()»",
    ),
    Piece(
        name="alternating by an iterator",
        state="turns = itertools.«cycle([0, 1, 1]) ; count()»",
        loss="loss = F.cross_entropy(out, y) if next(turns) % 2 == 0 else out.pow(2).mean()",
    ),
    Piece(
        name="alternating by a buffer",
        init="self.register_buffer('n{i}', torch.zeros((), dtype=torch.long))",
        loss="model.n{i} += 1\nloss = torch.where(model.n{i} % 2 == 0, F.cross_entropy(out, y), out.pow(2).mean())",
        plain=True,
    ),
    Piece(
        name="class by class",
        loss="loss = sum(F.cross_entropy(out[y == c], y[y == c], reduction='sum') for c in range(3)) / len(y)",
    ),
    Piece(
        name="scripted loss",
        top=(
            "@torch.jit.script\ndef ce{i}(out: Tensor, y: Tensor) -> Tensor:\n"
            "    return -torch.log_softmax(out, 1).gather(1, y[:, None]).mean()"
        ),
        loss="loss = ce{i}(out, y)",
    ),
    Piece(
        name="unused output",
        loss="loss = F.cross_entropy(«model.head(x) ; model.head(x) + 0.0 * out ; out.detach() + model.head(x)», y)",
    ),
]

EXTRAS: list[Piece] = [
    Piece(
        name="second head",
        init="self.s{i} = nn.Linear(6, «1 ; 6»)",
        loss="loss = loss + «0.3 ; q['w']» * «F.mse_loss(model.s{i}(h), x[:, :1].expand(len(x), model.s{i}.out_features)) ; model.s{i}(h.detach()).pow(2).mean()»",
        plain=True,
    ),
    Piece(
        name="weight penalty",
        loss=(
            "loss = loss + «0.01 ; q['w']» * sum(«p.pow(2).sum() ; p.abs().sum() ; p.norm()» for "
            "«p in model.parameters() ; name, p in model.named_parameters() if 'weight' in name»)"
        ),
        plain=True,
    ),
    Piece(
        name="second pass",
        loss=(
            "loss = loss + 0.3 * F.mse_loss(«model(x) ; model(x.flip(0)) ; model(x + 0.1 * torch.randn_like(x))», out« ; .detach()»)"
        ),
        plain=True,
    ),
    Piece(
        name="second pass under no_grad",
        loss="with torch.«no_grad ; inference_mode»():\n    t = model(x)\nloss = loss + 0.3 * F.«mse_loss ; l1_loss»(out, t.clone())",
        plain=True,
    ),
    Piece(
        name="teacher",
        init="self.t{i} = copy.deepcopy(self.first)« ; .requires_grad_(False)»",
        loss="with torch.no_grad():\n    t = torch.tanh(model.t{i}(x))\nloss = loss + «0.5 ; q['w']» * F.mse_loss(h, t)",
        plain=True,
    ),
    Piece(
        name="teacher in the closure",
        state="torch.manual_seed(q['k'])\nteacher = nn.Sequential(nn.Linear(6, 8), nn.«Dropout(0.2) ; BatchNorm1d(8)», nn.Linear(8, 3)).double()« ; .eval()»« ; .requires_grad_(False)»",
        loss="with torch.«no_grad ; inference_mode»():\n    t = teacher(x).softmax(1)\nloss = loss + F.kl_div(F.log_softmax(out / q['t'], 1), t.clone(), reduction='batchmean')",
    ),
    Piece(
        name="frozen teacher of all",
        top="torch.manual_seed(1)\nTEACHER{i} = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3)).double().eval().requires_grad_(False)",
        loss="«with torch.no_grad(): ; if True:»\n    t = TEACHER{i}(x)\nloss = loss + F.mse_loss(out, t)",
        plain=True,
    ),
    Piece(
        name="average of weights",
        init="self.t{i} = copy.deepcopy(self.first).requires_grad_(False)",
        before=(
            "if model.training:\n    with torch.no_grad():\n"
            "        for t, p in zip(model.t{i}.parameters(), model.first.parameters()):\n"
            "            «t.mul_(0.9).add_(p, alpha=0.1) ; t.lerp_(p, q['w']) ; t.copy_(0.5 * t + 0.5 * p) ; t.data = 0.9 * t.data + 0.1 * p.data"
            " ; t.data.mul_(0.9).add_(0.1 * p.data) ; t -= 0.1 * (t - p)»"
        ),
        loss="loss = loss + F.mse_loss(h, torch.tanh(model.t{i}(x)))",
    ),
    Piece(
        name="average of weights in the closure",
        state="teacher = None",
        loss=(
            "nonlocal teacher\nif teacher is None:\n    teacher = copy.deepcopy(model.first).requires_grad_(False)\n"
            "loss = loss + F.mse_loss(h, torch.tanh(teacher(x)))\nwith torch.no_grad():\n"
            "    for t, p in zip(teacher.parameters(), model.first.parameters()):\n        t.lerp_(p, 0.2)"
        ),
    ),
    Piece(
        name="gradient penalty",
        loss=(
            "with torch.enable_grad():\n    v = x.clone().requires_grad_()\n"
            "    (g,) = torch.autograd.grad(model(v).«sum() ; pow(2).sum()», v, create_graph=True)\n"
            "loss = loss + «0.1 ; q['w']» * g.pow(2).«mean() ; sum(1).mean()»"
        ),
    ),
    Piece(
        name="adversarial",
        loss=(
            "with torch.enable_grad():\n    v = x.clone().requires_grad_()\n"
            "    (g,) = torch.autograd.grad(F.cross_entropy(model(v), y), v)\n"
            "loss = loss + F.cross_entropy(model(x + 0.1 * g.«sign() ; detach()»), y)"
        ),
    ),
    Piece(
        name="inner step",
        loss=(
            "if model.training:\n    w = dict(model.head.named_parameters())\n"
            "    g = torch.autograd.grad(F.cross_entropy(out, y), list(w.values()), create_graph=«True ; False», retain_graph=True)\n"
            "    fast = {n: p - 0.1 * d for (n, p), d in zip(w.items(), g)}\n"
            "    loss = loss + F.cross_entropy(torch.func.functional_call(model.head, fast, (h,)), y)"
        ),
    ),
    Piece(
        name="backward in the step",
        loss="if model.training:\n    (0.1 * h.pow(2).mean()).backward(retain_graph=True)",
    ),
    Piece(
        name="two players",
        init="self.d{i} = nn.Linear(6, 1)",
        loss=(
            "«model.d{i}.requires_grad_(False) ; for p in model.d{i}.parameters(): p.requires_grad = False»\n"
            "loss = loss + F.softplus(-model.d{i}(h)).mean()\n"
            "«model.d{i}.requires_grad_(True) ; for p in model.d{i}.parameters(): p.requires_grad = True»\n"
            "loss = loss + F.softplus(model.d{i}(h.detach())).mean() + F.softplus(-model.d{i}(x)).mean()"
        ),
    ),
    Piece(
        name="latent variable",
        init="self.m{i}, self.v{i} = nn.Linear(6, 2), nn.Linear(6, 2)\nself.o{i} = nn.Linear(2, 6)",
        loss=(
            "post = torch.distributions.Normal(model.m{i}(h), F.softplus(model.v{i}(h)) + 0.1)\n"
            "prior = torch.distributions.Normal(«0.0, 1.0 ; torch.zeros(2, dtype=h.dtype), torch.ones(2, dtype=h.dtype)»)\n"
            "kl = torch.distributions.kl_divergence(post, prior).sum(1).mean()\n"
            "loss = loss + F.mse_loss(model.o{i}(post.rsample()), x) + «0.1 ; q['w']» * kl"
        ),
        plain=True,
    ),
    Piece(
        name="latent variable by hand",
        init="self.m{i}, self.v{i}, self.o{i} = nn.Linear(6, 2), nn.Linear(6, 2), nn.Linear(2, 6)",
        loss=(
            "mu, lv = model.m{i}(h), model.v{i}(h)\nz = mu + torch.exp(0.5 * lv) * torch.randn_like(mu)\n"
            "loss = loss + F.mse_loss(model.o{i}(z), x) - «0.05 ; q['w']» * (1 + lv - mu**2 - lv.exp()).mean()"
        ),
        plain=True,
    ),
    Piece(
        name="gumbel softmax",
        loss="loss = loss + F.gumbel_softmax(out, tau=«1.0 ; q['t']», hard=«False ; True»).pow(2)[:, 0].mean()",
        plain=True,
    ),
    Piece(
        name="annealed by a counter",
        state="n = 0",
        loss="nonlocal n\nn += 1\nloss = loss + «min(1.0, n / 5) ; (0.9**n) ; (n > 3)» * h.pow(2).mean()",
    ),
    Piece(
        name="annealed in an object",
        state="state = SimpleNamespace(n=0, w=q['w'])",
        loss="state.n += 1\nstate.w = «state.w * 0.9 ; q['w'] / state.n»\nloss = loss + state.w * h.pow(2).mean()",
    ),
    Piece(
        name="annealed by a callback",
        loss="loss = loss + «q['a'] * h.pow(2).mean() ; (h.pow(2).mean() if q['a'] > 0.5 else h.abs().mean()) ; F.dropout(h, q['a'], model.training).pow(2).mean()»",
        job={"anneal": "callback"},
    ),
    Piece(
        name="annealed in the network by a callback",
        init="self.w{i} = q",
        forward="h = h * (1 + self.w{i}['a'])",
        job={"anneal": "callback"},
    ),
    Piece(
        name="annealed by the schedule",
        loss="loss = loss + q['a'] * h.pow(2).mean()",
        job={"anneal": "schedule"},
    ),
    Piece(
        name="annealed by a buffer",
        init="self.register_buffer('t{i}', torch.zeros(()))",
        loss="if model.training:\n    model.t{i} += 1\nloss = loss + torch.clamp(model.t{i} / 5, max=1.0) * h.pow(2).mean()",
        plain=True,
    ),
    Piece(
        name="numbers from outside",
        top="W{i}, CONFIG{i} = 0.3, {'w': 0.2, 'on': True}\n\n\nclass Options{i}:\n    w = 0.4",
        loss="if CONFIG{i}['on']:\n    loss = loss + «W{i} ; CONFIG{i}['w'] ; Options{i}.w ; q['w']» * h.pow(2).mean()",
        plain=True,
    ),
    Piece(
        name="tensor in the closure",
        state="scale = torch.tensor([1.0, q['t'], q['w']], dtype=torch.float64)",
        loss="loss = loss + (out * scale).«pow(2).mean() ; std(1).mean()»",
        plain=True,
    ),
    Piece(
        name="tensor in the closure that is written",
        state="mean = torch.zeros(6, dtype=torch.float64)",
        loss="loss = loss + (h - mean).pow(2).mean()\nwith torch.no_grad():\n    mean«[:] = 0.9 * mean + 0.1 * h.mean(0) ; .mul_(0.9).add_(h.mean(0), alpha=0.1)»",
    ),
    Piece(
        name="centre",
        init="self.register_buffer('c{i}', torch.zeros(3, 6))",
        loss=(
            "loss = loss + 0.3 * (h - model.c{i}[y]).pow(2).mean()\nif model.training:\n    with torch.no_grad():\n"
            "        «model.c{i} = model.c{i}.index_add(0, y, h, alpha=0.1) ; model.c{i} = model.c{i} * 0.9 + 0.1 * h.mean(0)"
            " ; model.c{i} = torch.where((F.one_hot(y, 3).sum(0) > 0)[:, None], h.mean(0), model.c{i})»"
        ),
    ),
    Piece(
        name="memory bank",
        init="self.register_buffer('b{i}', torch.randn(8, 6))",
        loss=(
            "loss = loss + 0.1 * torch.logsumexp(h @ model.b{i}.t(), 1).mean()\nif model.training:\n"
            "    model.b{i} = torch.cat([h.detach(), model.b{i}])[:8]"
        ),
        plain=True,
    ),
    Piece(
        name="memory bank with a pointer",
        init="self.register_buffer('b{i}', torch.randn(30, 6))\nself.register_buffer('at{i}', torch.zeros(1, dtype=torch.long))",
        loss=(
            "loss = loss + 0.1 * torch.logsumexp(h @ model.b{i}.clone().t(), 1).mean()\nif model.training:\n"
            "    at = int(model.at{i})\n    model.b{i}[at : at + len(h)] = h.detach()\n    model.at{i}[0] = (at + len(h)) % 20"
        ),
    ),
    Piece(
        name="learned weights of two losses",
        init="self.w{i} = nn.Parameter(torch.zeros(2))",
        loss="loss = torch.exp(-model.w{i}[0]) * loss + torch.exp(-model.w{i}[1]) * h.pow(2).mean() + model.w{i}.sum()",
        plain=True,
    ),
    Piece(
        name="covariance",
        loss="«k = torch.cov(h.t()) ; k = (h - h.mean(0)).t() @ (h - h.mean(0)) / len(h)»\nloss = loss + «0.1 ; q['w']» * (k - torch.diag(k.diagonal())).pow(2).sum()",
        plain=True,
    ),
    Piece(
        name="determinant", loss="loss = loss - 0.1 * torch.logdet(h.t() @ h / len(h) + torch.eye(6, dtype=h.dtype))"
    ),
    Piece(
        name="eigenvalues",
        loss="loss = loss + 0.1 * torch.linalg.«eigvalsh(h.t() @ h + torch.diag(torch.arange(6.0, dtype=h.dtype))).max() ; svdvals(model.first.weight).max() ; matrix_norm(model.head.weight, 2)»",
    ),
    Piece(
        name="distances", loss="loss = loss + 0.1 * torch.«cdist(h, x).mean() ; pdist(h).mean() ; cdist(h, h).mean()»"
    ),
    Piece(
        name="loss in place",
        loss="«loss += 0.1 * h.pow(2).mean() ; loss *= q['w'] ; loss.mul_(0.5) ; loss = loss.clamp(max=q['t']) ; loss = torch.nan_to_num(loss)»",
        plain=True,
    ),
    Piece(
        name="branch on the loss",
        loss="if loss.item() > «1.1 ; q['t']»:\n    loss = loss * 0.5",
    ),
    Piece(
        name="scaled in the backward pass",
        top=(
            "class Scale{i}(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, h, w):\n        ctx.w = w\n        return h.view_as(h)\n\n"
            "    @staticmethod\n    def backward(ctx, g):\n        return ctx.w * g, None"
        ),
        init="self.r{i} = nn.Linear(6, 2)",
        loss="loss = loss + F.softplus(model.r{i}(Scale{i}.apply(h, «-0.5 ; -q['w']»))).mean()",
    ),
    Piece(
        name="jacobian",
        loss="loss = loss + 0.1 * torch.func.«vmap(torch.func.jacrev(model.head))(h).pow(2).mean() ; jvp(model.head, (h,), (torch.ones_like(h),))[1].pow(2).mean()»",
    ),
    Piece(
        name="target network, copied now and then",
        init="self.t{i} = copy.deepcopy(self.head).requires_grad_(False)",
        state="n = 0",
        loss=(
            "nonlocal n\nif model.training:\n    n += 1\n    if n % «3 ; 2» == 0:\n        «model.t{i}.load_state_dict(model.head.state_dict())"
            " ; model.t{i}.weight.data.copy_(model.head.weight.data)»\n"
            "with torch.no_grad():\n    best = model.t{i}(h).max(1).values\nloss = loss + F.smooth_l1_loss(out.gather(1, y[:, None])[:, 0], 0.9 * best)"
        ),
    ),
    Piece(
        name="weights as a vector",
        loss="v = nn.utils.parameters_to_vector(model.parameters())\nloss = loss + 0.01 * v.«pow(2).sum() ; abs().max() ; norm()»",
        plain=True,
    ),
    Piece(
        name="gradients read",
        loss="for p in model.parameters():\n    if p.grad is not None:\n        loss = loss + 0.1 * (p * p.grad).sum()",
    ),
    Piece(
        name="gradient set by hand",
        loss="if model.training:\n    model.head.bias.grad = torch.ones(3, dtype=torch.float64)",
    ),
    Piece(
        name="gradients of weights",
        loss=(
            "if model.training:\n    g = torch.autograd.grad(loss, list(model.head.parameters()), create_graph=True)\n"
            "    loss = loss + 0.1 * sum(d.pow(2).sum() for d in g)"
        ),
    ),
    Piece(
        name="counts of classes",
        loss=(
            "«c = F.one_hot(y, 3).sum(0) ; c = torch.bincount(y, minlength=3) ; c = torch.tensor([(y == k).sum() for k in range(3)]) ; "
            "c = torch.tensor([y.tolist().count(k) for k in range(3)]) ; c = torch.zeros(3, dtype=torch.long).index_add(0, y, torch.ones_like(y))»\n"
            "loss = loss + (out.softmax(1).mean(0) * (1.0 + c)).pow(2).sum()"
        ),
    ),
    Piece(
        name="nothing is trained",
        loss="loss = «torch.tensor(loss.item(), dtype=out.dtype, requires_grad=True) ; loss.detach().requires_grad_()»",
    ),
    Piece(
        name="copy of the network",
        loss="twin = copy.deepcopy(model)«.eval() ; .requires_grad_(False)»\nwith torch.no_grad():\n    t = twin(x)\nloss = loss + F.mse_loss(out, t)",
    ),
    Piece(
        name="different losses by a number",
        loss="if q['k'] == «1 ; 2»:\n    loss = loss + h.pow(2).mean()",
        plain=True,
    ),
    Piece(
        name="interpolated with noise",
        loss=(
            "t = torch.rand(len(x), 1, dtype=x.dtype)\nn = torch.randn_like(x)\nz = model.features(t * x + (1 - t) * n)\n"
            "loss = loss + (z - (x - n)).pow(2).mean()"
        ),
        plain=True,
    ),
    Piece(
        name="modes around a second pass",
        loss=(
            "before = model.training\nmodel.eval()\nwith torch.no_grad():\n    t = model(x)\nmodel.train(before)\nloss = loss + F.mse_loss(out, t)"
        ),
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
        after="seen.append(«loss.detach() ; loss.item()»)\nreturn loss",
    ),
    Piece(
        name="fails later",
        state="n = 0",
        after="nonlocal n\nn += 1\nif n == 6 and q['k'] == 2:\n    raise ValueError(f'this member fails on purpose at {n}')\nreturn loss",
    ),
    Piece(
        name="diverges later",
        init="self.register_buffer('z{i}', torch.zeros(()))",
        after="model.z{i} += 1\nreturn loss / (model.z{i} < 3 + q['k'])",
    ),
    Piece(
        name="weights changed last",
        after="if model.training:\n    model.head.weight.data.«mul_(0.99) ; clamp_(-0.3, 0.3)»\nreturn loss",
    ),
]
