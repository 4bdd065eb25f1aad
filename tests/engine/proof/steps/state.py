"""What a step adds to its loss and what changes from step to step: annealed weights, averages, banks, counters."""

from __future__ import annotations

from tests.engine.proof.steps.piece import Piece

EXTRAS: list[Piece] = [
    Piece(
        name="average of weights",
        init="self.t{i} = copy.deepcopy(self.first).requires_grad_(False)",
        before="""
            if model.training:
                with torch.no_grad():
                    for t, p in zip(model.t{i}.parameters(), model.first.parameters()):
                        «
                            t.mul_(0.9).add_(p, alpha=0.1) ; t.lerp_(p, q['w']) ; t.copy_(0.5 * t + 0.5 * p) ;
                            t.data = 0.9 * t.data + 0.1 * p.data ; t.data.mul_(0.9).add_(0.1 * p.data) ;
                            t -= 0.1 * (t - p)
                        »
        """,
        loss="loss = loss + F.mse_loss(h, torch.tanh(model.t{i}(x)))",
    ),
    Piece(
        name="average of weights in the closure",
        state="teacher = None",
        loss="""
            nonlocal teacher
            if teacher is None:
                teacher = copy.deepcopy(model.first).requires_grad_(False)
            loss = loss + F.mse_loss(h, torch.tanh(teacher(x)))
            with torch.no_grad():
                for t, p in zip(teacher.parameters(), model.first.parameters()):
                    t.lerp_(p, 0.2)
        """,
    ),
    Piece(
        name="annealed by a counter",
        state="n = 0",
        loss="""
            nonlocal n
            n += 1
            loss = loss + «min(1.0, n / 5) ; (0.9**n) ; (n > 3)» * h.pow(2).mean()
        """,
    ),
    Piece(
        name="annealed in an object",
        state="state = SimpleNamespace(n=0, w=q['w'])",
        loss="""
            state.n += 1
            state.w = «state.w * 0.9 ; q['w'] / state.n»
            loss = loss + state.w * h.pow(2).mean()
        """,
    ),
    Piece(
        name="annealed by a callback",
        loss="""
            loss = loss + «
                q['a'] * h.pow(2).mean() ; (h.pow(2).mean() if q['a'] > 0.5 else h.abs().mean()) ;
                F.dropout(h, q['a'], model.training).pow(2).mean()
            »
        """,
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
        loss="""
            if model.training:
                model.t{i} += 1
            loss = loss + torch.clamp(model.t{i} / 5, max=1.0) * h.pow(2).mean()
        """,
        plain=True,
    ),
    Piece(
        name="tensor in the closure that is written",
        state="mean = torch.zeros(6, dtype=torch.float64)",
        loss="""
            loss = loss + (h - mean).pow(2).mean()
            with torch.no_grad():
                mean«[:] = 0.9 * mean + 0.1 * h.mean(0) ; .mul_(0.9).add_(h.mean(0), alpha=0.1)»
        """,
    ),
    Piece(
        name="centre",
        init="self.register_buffer('c{i}', torch.zeros(3, 6))",
        loss="""
            loss = loss + 0.3 * (h - model.c{i}[y]).pow(2).mean()
            if model.training:
                with torch.no_grad():
                    «
                        model.c{i} = model.c{i}.index_add(0, y, h, alpha=0.1) ;
                        model.c{i} = model.c{i} * 0.9 + 0.1 * h.mean(0) ;
                        model.c{i} = torch.where((F.one_hot(y, 3).sum(0) > 0)[:, None], h.mean(0), model.c{i})
                    »
        """,
    ),
    Piece(
        name="memory bank",
        init="self.register_buffer('b{i}', torch.randn(8, 6))",
        loss="""
            loss = loss + 0.1 * torch.logsumexp(h @ model.b{i}.t(), 1).mean()
            if model.training:
                model.b{i} = torch.cat([h.detach(), model.b{i}])[:8]
        """,
        plain=True,
    ),
    Piece(
        name="memory bank with a pointer",
        init="""
            self.register_buffer('b{i}', torch.randn(30, 6))
            self.register_buffer('at{i}', torch.zeros(1, dtype=torch.long))
        """,
        loss="""
            loss = loss + 0.1 * torch.logsumexp(h @ model.b{i}.clone().t(), 1).mean()
            if model.training:
                at = int(model.at{i})
                model.b{i}[at : at + len(h)] = h.detach()
                model.at{i}[0] = (at + len(h)) % 20
        """,
    ),
    Piece(
        name="target network, copied now and then",
        init="self.t{i} = copy.deepcopy(self.head).requires_grad_(False)",
        state="n = 0",
        loss="""
            nonlocal n
            if model.training:
                n += 1
                if n % «3 ; 2» == 0:
                    «
                        model.t{i}.load_state_dict(model.head.state_dict()) ;
                        model.t{i}.weight.data.copy_(model.head.weight.data)
                    »
            with torch.no_grad():
                best = model.t{i}(h).max(1).values
            loss = loss + F.smooth_l1_loss(out.gather(1, y[:, None])[:, 0], 0.9 * best)
        """,
    ),
]
