"""Which bars hold? Reads what `shoal bench` and `shoal reproduce` wrote with --out.

python benchmarks/bars.py FILE...
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Bar = tuple[str, float | None, float]  # what, measured, at least

OVER_EAGER = {"mlp": 150.0, "cnn": 25.0, "gpt": 45.0, "resnet": 4.5, "mixed": 2.0}
OVER_CAPTURED = {"mlp": 18.0, "cnn": 3.0, "gpt": 4.5, "resnet": 1.3}
ON_CPU = {("tiny", 64): 15.0, ("mlp", 16): 1.8}
NEVER_SLOWER = 0.97
MEMORY_SAVED = 0.53
MOST_RESERVED = 1.15


def bench_bars(result: dict[str, Any]) -> Iterator[Bar]:
    gpu = result["stamp"]["gpu"] is not None
    rows = {(row["network"], row["way"]): row for row in result["results"]}
    for (network, way), row in rows.items():
        if way != "shoal":
            continue
        label = f"{network} x {row['members']}"
        if not gpu:
            least = ON_CPU.get((network, row["members"]), NEVER_SLOWER)
            yield f"{label}: times sequential eager, CPU", row["ratio"], least
            continue
        if network in OVER_EAGER:
            yield f"{label}: times sequential eager", row["ratio"], OVER_EAGER[network]
        captured = rows.get((network, "captured"))
        if network in OVER_CAPTURED and captured is not None:
            times = captured["ms"] / row["ms"] if captured["ms"] and row["ms"] else None
            yield f"{label}: times compiled and captured", times, OVER_CAPTURED[network]
        solo = rows.get((network, "eager"), {}).get("solo_reserved")
        if solo and row["memory"] and row["memory"]["reserved"]:
            most = MOST_RESERVED * solo
            yield f"{label}: room under {MOST_RESERVED} x the solo peaks", most / row["memory"]["reserved"], 1.0


def pack_bars(result: dict[str, Any]) -> Iterator[Bar]:
    for line in result["lines"]:
        if line["published"] is not None:
            yield f"Pack, {line['network']} x {line['packed']}: gain", line["gain"], line["published"]


def unifiednn_bars(result: dict[str, Any]) -> Iterator[Bar]:
    for line in result["lines"]:
        yield f"UnifiedNN, {line['networks']}: memory saved", line["memory_saved"], MEMORY_SAVED


def bars(result: dict[str, Any]) -> Iterator[Bar]:
    if "results" in result:
        return bench_bars(result)
    return unifiednn_bars(result) if "published" in result else pack_bars(result)


def main(files: list[str]) -> int:
    if not files:
        print(__doc__)
        return 1
    missed = 0
    for file in files:
        for what, measured, least in bars(json.loads(Path(file).read_text())):
            holds = measured is not None and measured >= least
            missed += not holds
            shown = "not measured" if measured is None else f"{measured:.3g}"
            print(f"{'holds ' if holds else 'MISSED'}  {what}: {shown} (bar {least:g})")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
