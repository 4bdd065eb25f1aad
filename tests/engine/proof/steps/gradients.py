"""Pieces inside the network about gradients: modes, `.data`, toggles, own functions, TorchScript, hooks."""

from __future__ import annotations

from tests.engine.proof.steps.piece import Piece

BLOCKS: list[Piece] = [
    Piece(
        name="grad mode",
        init="self.l{i} = nn.Linear(6, 6)",
        forward="""
            with «
                torch.no_grad() ; torch.inference_mode() ; torch.set_grad_enabled(False) ;
                torch.set_grad_enabled(self.training)
            »:
                g = self.l{i}(«h ; x»)
            h = «h + g ; h * g.clone().sigmoid() ; g.clone() + x»
        """,
    ),
    Piece(
        name="grad mode as a statement",
        init="self.l{i} = nn.Linear(6, 6)",
        forward="""
            before = torch.is_grad_enabled()
            torch.set_grad_enabled(False)
            g = self.l{i}(h)
            torch.set_grad_enabled(before)
            h = h * torch.sigmoid(g)
        """,
    ),
    Piece(
        name="method under no_grad",
        top="""
            @torch.«no_grad ; inference_mode»()
            def frozen{i}(layer, h):
                return torch.tanh(layer(h))
        """,
        init="self.l{i} = nn.Linear(6, 6)",
        forward="h = h + frozen{i}(self.l{i}, h)",
    ),
    Piece(
        name="past autograd",
        init="self.l{i} = nn.Linear(6, 6)",
        forward="""
            h = «
                h + self.l{i}(h).data ; h * torch.sigmoid(self.l{i}(h).data) ;
                F.linear(h, self.l{i}.weight.data) ; h + F.linear(h, self.l{i}.weight.detach()) ;
                h + 0.5 * (h.round() - h).detach() ; h - h.data.mean(0)
            »
        """,
    ),
    Piece(
        name="toggle in forward",
        init="self.l{i} = nn.Linear(6, 6)",
        forward="""
            «self.l{i}.requires_grad_(False) ; self.l{i}.weight.requires_grad = False»
            g = self.l{i}(h)
            «self.l{i}.requires_grad_(True) ; self.l{i}.weight.requires_grad = True»
            h = g« ; + self.l{i}(x)»
        """,
    ),
    Piece(
        name="custom function",
        top="""
            class Fn{i}(torch.autograd.Function):
                @staticmethod
                def forward(ctx, h, w):
                    ctx.w = w
                    ctx.save_for_backward(h)
                    return «h.sign() ; h.clone() ; h * torch.sigmoid(h) ; h.view_as(h)»

                @staticmethod
                def backward(ctx, g):
                    (h,) = ctx.saved_tensors
                    return «g * ctx.w ; -ctx.w * g ; g * (h.abs() < 1) ; g.clamp(-0.01, 0.01)», None


            fn{i} = Fn{i}.apply
        """,
        init="self.w{i} = «0.5 ; q['w']»",
        forward="h = «Fn{i}.apply ; fn{i}»(h, self.w{i}) + 0.3 * h",
    ),
    Piece(
        name="custom function, newer form",
        top="""
            class Fn{i}(torch.autograd.Function):
                @staticmethod
                def forward(h):
                    return torch.round(h * 4) / 4

                @staticmethod
                def setup_context(ctx, inputs, output):
                    ctx.save_for_backward(inputs[0])

                @staticmethod
                def backward(ctx, g):
                    return g * (ctx.saved_tensors[0].abs() < 2)
        """,
        forward="h = h + Fn{i}.apply(h)",
    ),
    Piece(
        name="scripted function",
        top="""
            @torch.jit.script
            def swish{i}(v: Tensor, w: float) -> Tensor:
                return v * torch.sigmoid(w * v)


            for _ in range(«0 ; 3»):
                swish{i}(torch.randn(2, 6, dtype=torch.float64, requires_grad=True), 1.0).sum().backward()
        """,
        init="self.w{i} = «1.0 ; q['w']»",
        forward="h = swish{i}(h, self.w{i})",
    ),
    Piece(
        name="scripted function with a branch",
        top="""
            @torch.jit.script
            def act{i}(v: Tensor) -> Tensor:
                if v.shape[0] > 4:
                    return torch.tanh(v)
                return torch.relu(v) + 0.1 * v.detach()
        """,
        forward="h = act{i}(h)",
    ),
    Piece(
        name="checkpoint",
        init="self.l{i} = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(«0.0 ; 0.2 ; q['p']»))",
        forward="h = checkpoint(self.l{i}, h, use_reentrant=«False ; True»)",
    ),
    Piece(
        name="forward hook",
        top="""
            def half{i}(module, inputs, output):
                return «output * 0.5 ; output.detach() ; output + inputs[0]»
        """,
        init="""
            self.l{i} = nn.Linear(6, 6)
            self.l{i}.register_forward_hook(half{i})
        """,
        forward="h = self.l{i}(h)",
    ),
    Piece(
        name="backward hook",
        init="""
            self.l{i} = nn.Linear(6, 6)
            «
                self.l{i}.register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,)) ;
                self.l{i}.weight.register_hook(lambda g: g * 0.5)
            »
        """,
        forward="h = self.l{i}(h)",
    ),
    Piece(
        name="tensor hook",
        forward="""
            if h.requires_grad:
                h = h * 1.0
                h.register_hook(lambda g: g.clamp(-0.01, 0.01))
        """,
    ),
    Piece(
        name="functional transform",
        init="self.l{i} = nn.Linear(6, 6)",
        forward="""
            h = «
                torch.func.vmap(self.l{i})(h) ; torch.func.vmap(lambda v: torch.tanh(v).cumsum(0))(h) ;
                h + torch.func.grad(lambda v: torch.tanh(v).sum())(h) ;
                torch.func.functional_call(self.l{i}, {'weight': self.l{i}.weight * 0.5}, (h,), strict=False)
            »
        """,
    ),
    Piece(
        name="writes to .data",
        init="""
            self.register_buffer('m{i}', torch.zeros(6))
            self.l{i} = nn.Linear(6, 6)
        """,
        forward="""
            if self.training:
                «
                    self.m{i}.data = 0.9 * self.m{i} + 0.1 * h.detach().mean(0) ;
                    self.m{i}.data.add_(h.data.mean(0)) ; self.l{i}.weight.data.clamp_(-0.3, 0.3) ;
                    self.l{i}.weight.data.mul_(0.99)
                »
            h = self.l{i}(h) - self.m{i}
        """,
    ),
    Piece(
        name="activations caught by a hook",
        init="""
            self.l{i}, self.a{i} = nn.Linear(6, 6), {}
            self.l{i}.register_forward_hook(lambda m, inputs, out: self.a{i}.update(out=out))
        """,
        forward="""
            h = h + self.l{i}(h)
            h = h + «self.a{i}['out'] ; self.a{i}.pop('out')»
        """,
    ),
    Piece(
        name="saved tensors packed",
        init="self.l{i} = nn.Linear(6, 6)",
        forward="""
            with torch.autograd.graph.«save_on_cpu() ; saved_tensors_hooks(lambda t: t * 1.0, lambda t: t)»:
                h = torch.tanh(self.l{i}(h))
        """,
    ),
]
