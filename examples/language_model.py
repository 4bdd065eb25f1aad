"""A small language model over characters, with four learning rates, two seeds and its own step.

python examples/language_model.py
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

TEXT = """
Full fathom five thy father lies;
Of his bones are coral made;
Those are pearls that were his eyes:
Nothing of him that doth fade
But doth suffer a sea-change
Into something rich and strange.
Sea-nymphs hourly ring his knell.
Come unto these yellow sands,
And then take hands:
Courtsied when you have and kiss'd
The wild waves whist,
Foot it featly here and there;
And, sweet sprites, the burthen bear.
"""
LETTERS = sorted(set(TEXT))
LENGTH, WIDTH = 32, 32


class Block(nn.Module):
    """One transformer block with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, WIDTH))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Characters in, a score for each next character out."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, len(LETTERS))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.token(tokens) + self.place(places)))


def step(model: nn.Module, batch: Any) -> Tensor:
    """Predict every next character of a row."""
    (rows,) = batch
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def write(model: nn.Module, start: str, length: int) -> str:
    """Continue a text with the likeliest characters."""
    text = start
    for _ in range(length):
        tokens = torch.tensor([[LETTERS.index(letter) for letter in text[-LENGTH:]]])
        text += LETTERS[int(model(tokens)[0, -1].argmax())]
    return text


if __name__ == "__main__":
    tokens = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    rows = tokens.unfold(0, LENGTH + 1, 2).contiguous()  # windows of 33 characters
    jobs = [
        shoal.Job(
            model=Model,
            data=(rows,),
            step=step,
            optimizer=torch.optim.AdamW,
            hparams={"lr": lr},
            schedule=lambda t: min(1.0, (t + 1) / 10),
            clip_norm=1.0,
            batch_size=32,
            epochs=12,
            seed=seed,
            name=f"lr={lr:g} seed={seed}",
        )
        for lr in (1e-3, 3e-3, 1e-2, 3e-2)
        for seed in (0, 1)
    ]
    results = shoal.train(jobs)
    best = min(results, key=lambda result: result.history[-1]["loss"])
    print(f"best: {best.name}, loss {best.history[-1]['loss']:.3f}")
    print(write(best.model.eval(), "Full fathom", 60))
