"""Prints what the patterns shard of each model of the zoo, as the Markdown table of docs/coverage.md.

python benchmarks/coverage.py [MODEL ...] > docs/coverage.md
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from zoo import ZOO, graph

from paddle_rbt_plugin.layers import cluster_layers
from paddle_rbt_plugin.pattern import match_all
from paddle_rbt_plugin.pattern.coverage import Coverage, coverage, table
from paddle_rbt_plugin.plugins import load_plugins

TEXT = """# What the patterns cover

The models of `tests/zoo`, small ones in Paddle's public API, each wired as its authors wire it. A column says how many of
the parameter bytes the patterns shard along `mp` or `ep`: in the transformer blocks, in what stands before them (embeddings)
and behind them (heads). A tied embedding counts in both. The last column lists what stays whole, by the pattern that says so.
The models are narrow (hidden size 64), so vectors and small tables weigh more here than in a model of real size.

Made by `python benchmarks/coverage.py > docs/coverage.md`.
"""


def cover(name: str) -> Coverage:
    """The coverage of one model of the zoo by the patterns that are installed."""
    found = graph(name)
    layers = cluster_layers(found)
    return coverage(found, layers, match_all(found, load_plugins().patterns, layers))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(TEXT)
    print(table((name, cover(name)) for name in sys.argv[1:] or ZOO))
