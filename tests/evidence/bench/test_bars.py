"""The script that says which bars hold can say no."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[3] / "benchmarks" / "bars.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("bars", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(way: str, ms: float | None, ratio: float | None, **more: Any) -> dict[str, Any]:
    return {"network": "mlp", "way": way, "members": 32, "ms": ms, "ratio": ratio, "memory": None, **more}


@pytest.mark.parametrize(
    ("ratio", "reserved", "status"), [(200.0, 100, 0), (149.0, 100, 1), (200.0, 120, 1), (None, 1, 1)]
)
def test_a_missed_bar_is_told(tmp_path: Path, ratio: float | None, reserved: int, status: int) -> None:
    ms = None if ratio is None else 43.0 / ratio
    rows = [row("eager", 43.0, 1.0, solo_reserved=100), row("captured", 5.4, 8.0)]
    rows.append(row("shoal", ms, ratio) | {"memory": {"reserved": reserved}})
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps({"stamp": {"gpu": "one"}, "results": rows}))
    assert load().main([str(file)]) == status


def test_the_two_papers(tmp_path: Path) -> None:
    bars = load()
    pack = {"lines": [{"network": "mlp3", "packed": 2, "gain": 0.3, "published": 0.397}]}
    assert [(m, least) for _, m, least in bars.bars(pack)] == [(0.3, 0.397)]
    unified = {"published": {}, "lines": [{"networks": "8 CNNs", "memory_saved": 0.6}]}
    assert [(m, least) for _, m, least in bars.bars(unified)] == [(0.6, 0.53)]
