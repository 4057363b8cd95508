"""Prints what the patterns shard of each model of the zoo, and which ops give shardings up, as docs/coverage.md shows it.

python benchmarks/coverage.py [MODEL ...]
python benchmarks/coverage.py --formers   # unmodified models of PaddleFormers, with the extra ``formers``
python benchmarks/coverage.py --named     # models that ``paddle-rbt models`` lists
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from gathers import MESH, gathers
from zoo import ZOO, graph

from paddle_rbt_plugin.graph import Graph
from paddle_rbt_plugin.handover.pir.configs import config_graph
from paddle_rbt_plugin.models import config_names, count_parameters, named_config
from paddle_rbt_plugin.pattern.coverage import Coverage, coverage, table
from paddle_rbt_plugin.plugins import load_plugins
from paddle_rbt_plugin.search import Analysis, analyse

DEGREES = (2, 4)


def analysed(found: Graph, rewrite: bool = True) -> Analysis:
    return analyse(found, load_plugins().patterns, rewrite=rewrite)


def cover(found: Analysis) -> Coverage:
    """The coverage of a model. Raises SystemExit where a degree of the table is not legal or loses a sharding."""
    for mp in DEGREES:
        mesh = MESH.__class__(("mp",), (mp,), tuple(range(mp)))
        problem = found.indivisible({"mp": mp}) or found.lost_sharding(found.complete(mesh))
        if problem:
            raise SystemExit(f"mp {mp}: {problem}")
    return coverage(found.graph, found.layers, found.matches)


def gathering(names: Iterable[str]) -> str:
    """The ops that gather, as written and as handed over, as a Markdown table."""
    written, handed_over, models = Counter[str](), Counter[str](), dict[str, list[str]]()
    for name in names:
        before, after = (gathers(analysed(graph(name), rewrite).complete(MESH)) for rewrite in (False, True))
        written += before
        handed_over += after
        for op in before:
            models.setdefault(op, []).append(name)
    lines = ["| op | as written | as handed over | models |", "|---|---|---|---|"]
    lines += [f"| {op} | {written[op]} | {handed_over[op]} | {', '.join(models[op])} |" for op in sorted(written)]
    return "\n".join(lines)


def formers() -> str:
    """The coverage of unmodified models of PaddleFormers."""
    from test_coverage_formers import MODELS, SPEC, build

    from paddle_rbt_plugin.handover.pir.trace import trace_layer

    return table((name, cover(analysed(trace_layer(build(name), SPEC).graph))) for name in MODELS)


def named() -> str:
    """The coverage of the models by name, one size of each: the smallest whose heads the degrees divide."""
    rows: dict[str, tuple[str, Coverage]] = {}
    for name in sorted(config_names(), key=lambda name: count_parameters(named_config(name)).total):
        family = re.split(r"-?\d", name)[0]
        if family not in rows:
            with suppress(SystemExit):
                rows[family] = name, cover(analysed(config_graph(named_config(name), 8)))
    return table(sorted(rows.values(), key=lambda row: row[0]))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="models of the zoo; all of them where none is named")
    parser.add_argument("--formers", action="store_true", help="models of PaddleFormers instead")
    parser.add_argument("--named", action="store_true", help="models that are known by name instead")
    chosen = parser.parse_args(arguments)
    if chosen.named:
        print(named())
        return
    if chosen.formers:
        print(formers())
        return
    names = chosen.models or list(ZOO)
    print(table((name, cover(analysed(graph(name)))) for name in names), gathering(names), sep="\n\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
