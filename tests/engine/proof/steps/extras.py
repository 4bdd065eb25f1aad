"""What a step adds to its loss: second heads, teachers, penalties, annealed weights, python state."""

from __future__ import annotations

from tests.engine.proof.steps.piece import Piece

EXTRAS: list[Piece] = [
    Piece(
        name="second head",
        init="self.s{i} = nn.Linear(6, «1 ; 6»)",
        loss="""
            loss = loss + «0.3 ; q['w']» * «
                F.mse_loss(model.s{i}(h), x[:, :1].expand(len(x), model.s{i}.out_features)) ;
                model.s{i}(h.detach()).pow(2).mean()
            »
        """,
        plain=True,
    ),
    Piece(
        name="weight penalty",
        loss="""
            loss = loss + «0.01 ; q['w']» * sum(«p.pow(2).sum() ; p.abs().sum() ; p.norm()» for «
                p in model.parameters() ; name, p in model.named_parameters() if 'weight' in name
            »)
        """,
        plain=True,
    ),
    Piece(
        name="second pass",
        loss="""
            loss = loss + 0.3 * F.mse_loss(«
                model(x) ; model(x.flip(0)) ; model(x + 0.1 * torch.randn_like(x))
            », out« ; .detach()»)
        """,
        plain=True,
    ),
    Piece(
        name="second pass under no_grad",
        loss="""
            with torch.«no_grad ; inference_mode»():
                t = model(x)
            loss = loss + 0.3 * F.«mse_loss ; l1_loss»(out, t.clone())
        """,
        plain=True,
    ),
    Piece(
        name="teacher",
        init="self.t{i} = copy.deepcopy(self.first)« ; .requires_grad_(False)»",
        loss="""
            with torch.no_grad():
                t = torch.tanh(model.t{i}(x))
            loss = loss + «0.5 ; q['w']» * F.mse_loss(h, t)
        """,
        plain=True,
    ),
    Piece(
        name="teacher in the closure",
        state="""
            torch.manual_seed(q['k'])
            teacher = nn.Sequential(nn.Linear(6, 8), nn.«
                Dropout(0.2) ; BatchNorm1d(8)
            », nn.Linear(8, 3)).double()« ; .eval()»« ; .requires_grad_(False)»
        """,
        loss="""
            with torch.«no_grad ; inference_mode»():
                t = teacher(x).softmax(1)
            loss = loss + F.kl_div(F.log_softmax(out / q['t'], 1), t.clone(), reduction='batchmean')
        """,
    ),
    Piece(
        name="frozen teacher of all",
        top="""
            torch.manual_seed(1)
            TEACHER{i} = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3)).double().eval()
            TEACHER{i}.requires_grad_(False)
        """,
        loss="""
            «with torch.no_grad(): ; if True:»
                t = TEACHER{i}(x)
            loss = loss + F.mse_loss(out, t)
        """,
        plain=True,
    ),
    Piece(
        name="gradient penalty",
        loss="""
            with torch.enable_grad():
                v = x.clone().requires_grad_()
                (g,) = torch.autograd.grad(model(v).«sum() ; pow(2).sum()», v, create_graph=True)
            loss = loss + «0.1 ; q['w']» * g.pow(2).«mean() ; sum(1).mean()»
        """,
    ),
    Piece(
        name="adversarial",
        loss="""
            with torch.enable_grad():
                v = x.clone().requires_grad_()
                (g,) = torch.autograd.grad(F.cross_entropy(model(v), y), v)
            loss = loss + F.cross_entropy(model(x + 0.1 * g.«sign() ; detach()»), y)
        """,
    ),
    Piece(
        name="inner step",
        loss="""
            if model.training:
                w = dict(model.head.named_parameters())
                g = torch.autograd.grad(F.cross_entropy(out, y), list(w.values()), create_graph=«
                    True ; False
                », retain_graph=True)
                fast = {n: p - 0.1 * d for (n, p), d in zip(w.items(), g)}
                loss = loss + F.cross_entropy(torch.func.functional_call(model.head, fast, (h,)), y)
        """,
    ),
    Piece(
        name="backward in the step",
        loss="""
            if model.training:
                (0.1 * h.pow(2).mean()).backward(retain_graph=True)
        """,
    ),
    Piece(
        name="two players",
        init="self.d{i} = nn.Linear(6, 1)",
        loss="""
            «model.d{i}.requires_grad_(False) ; for p in model.d{i}.parameters(): p.requires_grad = False»
            loss = loss + F.softplus(-model.d{i}(h)).mean()
            «model.d{i}.requires_grad_(True) ; for p in model.d{i}.parameters(): p.requires_grad = True»
            loss = loss + F.softplus(model.d{i}(h.detach())).mean() + F.softplus(-model.d{i}(x)).mean()
        """,
    ),
    Piece(
        name="latent variable",
        init="""
            self.m{i}, self.v{i} = nn.Linear(6, 2), nn.Linear(6, 2)
            self.o{i} = nn.Linear(2, 6)
        """,
        loss="""
            post = distributions.Normal(model.m{i}(h), F.softplus(model.v{i}(h)) + 0.1)
            prior = distributions.Normal(«
                0.0, 1.0 ; torch.zeros(2, dtype=h.dtype), torch.ones(2, dtype=h.dtype)
            »)
            kl = distributions.kl_divergence(post, prior).sum(1).mean()
            loss = loss + F.mse_loss(model.o{i}(post.rsample()), x) + «0.1 ; q['w']» * kl
        """,
        plain=True,
    ),
    Piece(
        name="latent variable by hand",
        init="self.m{i}, self.v{i}, self.o{i} = nn.Linear(6, 2), nn.Linear(6, 2), nn.Linear(2, 6)",
        loss="""
            mu, lv = model.m{i}(h), model.v{i}(h)
            z = mu + torch.exp(0.5 * lv) * torch.randn_like(mu)
            loss = loss + F.mse_loss(model.o{i}(z), x) - «0.05 ; q['w']» * (1 + lv - mu**2 - lv.exp()).mean()
        """,
        plain=True,
    ),
    Piece(
        name="gumbel softmax",
        loss="""
            loss = loss + F.gumbel_softmax(out, tau=«1.0 ; q['t']», hard=«False ; True»).pow(2)[:, 0].mean()
        """,
        plain=True,
    ),
    Piece(
        name="numbers from outside",
        top="""
            W{i}, CONFIG{i} = 0.3, {'w': 0.2, 'on': True}


            class Options{i}:
                w = 0.4
        """,
        loss="""
            if CONFIG{i}['on']:
                loss = loss + «W{i} ; CONFIG{i}['w'] ; Options{i}.w ; q['w']» * h.pow(2).mean()
        """,
        plain=True,
    ),
    Piece(
        name="tensor in the closure",
        state="scale = torch.tensor([1.0, q['t'], q['w']], dtype=torch.float64)",
        loss="loss = loss + (out * scale).«pow(2).mean() ; std(1).mean()»",
        plain=True,
    ),
    Piece(
        name="learned weights of two losses",
        init="self.w{i} = nn.Parameter(torch.zeros(2))",
        loss="""
            loss = torch.exp(-model.w{i}[0]) * loss + torch.exp(-model.w{i}[1]) * h.pow(2).mean() + model.w{i}.sum()
        """,
        plain=True,
    ),
    Piece(
        name="covariance",
        loss="""
            «k = torch.cov(h.t()) ; k = (h - h.mean(0)).t() @ (h - h.mean(0)) / len(h)»
            loss = loss + «0.1 ; q['w']» * (k - torch.diag(k.diagonal())).pow(2).sum()
        """,
        plain=True,
    ),
    Piece(
        name="determinant",
        loss="loss = loss - 0.1 * torch.logdet(h.t() @ h / len(h) + torch.eye(6, dtype=h.dtype))",
    ),
    Piece(
        name="eigenvalues",
        loss="""
            loss = loss + 0.1 * torch.linalg.«
                eigvalsh(h.t() @ h + torch.diag(torch.arange(6.0, dtype=h.dtype))).max() ;
                svdvals(model.first.weight).max() ; matrix_norm(model.head.weight, 2)
            »
        """,
    ),
    Piece(
        name="distances",
        loss="loss = loss + 0.1 * torch.«cdist(h, x).mean() ; pdist(h).mean() ; cdist(h, h).mean()»",
    ),
    Piece(
        name="loss in place",
        loss="""
            «
                loss += 0.1 * h.pow(2).mean() ; loss *= q['w'] ; loss.mul_(0.5) ; loss = loss.clamp(max=q['t']) ;
                loss = torch.nan_to_num(loss)
            »
        """,
        plain=True,
    ),
    Piece(
        name="branch on the loss",
        loss="""
            if loss.item() > «1.1 ; q['t']»:
                loss = loss * 0.5
        """,
    ),
    Piece(
        name="scaled in the backward pass",
        top="""
            class Scale{i}(torch.autograd.Function):
                @staticmethod
                def forward(ctx, h, w):
                    ctx.w = w
                    return h.view_as(h)

                @staticmethod
                def backward(ctx, g):
                    return ctx.w * g, None
        """,
        init="self.r{i} = nn.Linear(6, 2)",
        loss="loss = loss + F.softplus(model.r{i}(Scale{i}.apply(h, «-0.5 ; -q['w']»))).mean()",
    ),
    Piece(
        name="jacobian",
        loss="""
            loss = loss + 0.1 * torch.func.«
                vmap(torch.func.jacrev(model.head))(h).pow(2).mean() ;
                jvp(model.head, (h,), (torch.ones_like(h),))[1].pow(2).mean()
            »
        """,
    ),
    Piece(
        name="weights as a vector",
        loss="""
            v = nn.utils.parameters_to_vector(model.parameters())
            loss = loss + 0.01 * v.«pow(2).sum() ; abs().max() ; norm()»
        """,
        plain=True,
    ),
    Piece(
        name="gradients read",
        loss="""
            for p in model.parameters():
                if p.grad is not None:
                    loss = loss + 0.1 * (p * p.grad).sum()
        """,
    ),
    Piece(
        name="gradient set by hand",
        loss="""
            if model.training:
                model.head.bias.grad = torch.ones(3, dtype=torch.float64)
        """,
    ),
    Piece(
        name="gradients of weights",
        loss="""
            if model.training:
                g = torch.autograd.grad(loss, list(model.head.parameters()), create_graph=True)
                loss = loss + 0.1 * sum(d.pow(2).sum() for d in g)
        """,
    ),
    Piece(
        name="counts of classes",
        loss="""
            «
                c = F.one_hot(y, 3).sum(0) ; c = torch.bincount(y, minlength=3) ;
                c = torch.tensor([(y == k).sum() for k in range(3)]) ;
                c = torch.tensor([y.tolist().count(k) for k in range(3)]) ;
                c = torch.zeros(3, dtype=torch.long).index_add(0, y, torch.ones_like(y))
            »
            loss = loss + (out.softmax(1).mean(0) * (1.0 + c)).pow(2).sum()
        """,
    ),
    Piece(
        name="nothing is trained",
        loss="""
            loss = «
                torch.tensor(loss.item(), dtype=out.dtype, requires_grad=True) ; loss.detach().requires_grad_()
            »
        """,
    ),
    Piece(
        name="copy of the network",
        loss="""
            twin = copy.deepcopy(model)«.eval() ; .requires_grad_(False)»
            with torch.no_grad():
                t = twin(x)
            loss = loss + F.mse_loss(out, t)
        """,
    ),
    Piece(
        name="different losses by a number",
        loss="""
            if q['k'] == «1 ; 2»:
                loss = loss + h.pow(2).mean()
        """,
        plain=True,
    ),
    Piece(
        name="interpolated with noise",
        loss="""
            t = torch.rand(len(x), 1, dtype=x.dtype)
            eps = torch.randn_like(x)
            z = model.features(t * x + (1 - t) * eps)
            loss = loss + (z - (x - eps)).pow(2).mean()
        """,
        plain=True,
    ),
    Piece(
        name="modes around a second pass",
        loss="""
            before = model.training
            model.eval()
            with torch.no_grad():
                t = model(x)
            model.train(before)
            loss = loss + F.mse_loss(out, t)
        """,
    ),
]
