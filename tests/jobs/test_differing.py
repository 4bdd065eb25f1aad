"""The settings in which jobs differ."""

from types import SimpleNamespace

import torch

from shoal import EMA
from shoal.jobs.differing import differing


def test_only_what_differs_and_as_plain_values() -> None:
    same = {"batch_size": 8, "seed": 0}
    one = SimpleNamespace(**same, optimizer=torch.optim.SGD, average=None)
    other = SimpleNamespace(**same, optimizer="Adam", average=EMA(decay=0.5))
    assert [list(each) for each in differing([one, other])] == [["optimizer", "average"]] * 2
    assert differing([one, other])[0] == {"optimizer": "SGD", "average": None}
    assert str(differing([one, other])[1]["average"]).startswith("EMA(decay=0.5")
    assert differing([one, other], besides=["average"]) == [{"optimizer": "SGD"}, {"optimizer": "Adam"}]
    assert differing([one]) == [{}] and differing([]) == []
