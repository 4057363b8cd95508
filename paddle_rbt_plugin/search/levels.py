"""The three levels by name."""

from __future__ import annotations

from paddle_rbt_plugin.search.o1 import run_o1
from paddle_rbt_plugin.search.o2 import run_o2
from paddle_rbt_plugin.search.o3 import run_o3
from paddle_rbt_plugin.search.result import SearchResult
from paddle_rbt_plugin.search.space import candidate_dict
from paddle_rbt_plugin.search.state import Search

_SEARCHES = {"o1": run_o1, "o2": run_o2, "o3": run_o3}


def run_level(search: Search, level: str) -> SearchResult:
    """The best plan of a level. Raises NoFeasiblePlan, which names what is short and the nearest candidate."""
    result = _SEARCHES[level](search)
    search.progress.finish(result.best.estimate.step_time_s, candidate_dict(result.best.candidate))
    return result
