"""The search: analysis of a program, the space of candidates, and the levels that walk it."""

from paddle_rbt_plugin.search.analysis import Analysis, Loss, analyse
from paddle_rbt_plugin.search.dimensions import SearchSpace
from paddle_rbt_plugin.search.levels import run_level
from paddle_rbt_plugin.search.progress import Progress, Watcher
from paddle_rbt_plugin.search.rejections import Reason, Rejected
from paddle_rbt_plugin.search.result import Evaluated, SearchResult
from paddle_rbt_plugin.search.space import candidate_dict, candidates
from paddle_rbt_plugin.search.state import Search

__all__ = [
    "Analysis",
    "Evaluated",
    "Loss",
    "Progress",
    "Reason",
    "Rejected",
    "Search",
    "SearchResult",
    "SearchSpace",
    "Watcher",
    "analyse",
    "candidate_dict",
    "candidates",
    "run_level",
]
