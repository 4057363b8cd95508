"""Plans of earlier runs, found by the content of everything that they depend on.

A plan follows from the program, the request, the build of Paddle, and the code of this package. If all of these are the same,
the plan is read from the cache (``completion.cache``) instead of being searched for again. Patterns, cost models and op names
of other packages, or of the caller, are code that may change without notice: plans that can depend on them are not remembered.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paddle_rbt_plugin.completion.cache import build_of_paddle, file_of, mark_used, prune, read_lines, write_lines
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.graph import Graph
from paddle_rbt_plugin.plan.plan import Plan
from paddle_rbt_plugin.plugins import Plugins
from paddle_rbt_plugin.request import Request

_OWN_DISTRIBUTION = "paddle-rbt-plugin"
_OWN_PACKAGES = ("paddle_rbt_plugin", "paddle_rbt_patterns")
_WITHOUT_INFLUENCE: dict[str, Any] = {
    **dict.fromkeys(("cluster", "search_space", "save_path", "time_limit", "cache")),
    "verify": True,
}
"""Settings that do not change which plan is best; cluster and search space are compared as they were parsed."""


class RememberedPlan:
    """The plan for one graph and request in ``folder``, if an earlier run found it. Nothing is read or written if ``folder`` is
    None."""

    def __init__(self, folder: Path | None, graph: Graph, request: Request, plugins: Plugins):
        self._folder = folder if _is_our_own(request, plugins) else None
        if self._folder is not None:
            self._identity = json.dumps([*build_of_paddle(), _code()])
            self._path = file_of(self._folder, self._identity, f"plan-{_digest(graph, request, plugins)}")

    def find(self) -> Plan | None:
        """The plan, or None if there is none."""
        lines = read_lines(self._path, self._identity) if self._folder is not None else []
        if not lines:
            return None
        mark_used(self._path)
        with suppress(ValueError, TunerError):
            return Plan.from_dict(json.loads(lines[0]), str(self._path))
        return None

    def keep(self, plan: Plan) -> None:
        """Writes the plan. A folder that cannot be written is not an error."""
        if self._folder is not None:
            with suppress(OSError):
                write_lines(self._path, self._identity, [json.dumps(plan.to_dict(), separators=(",", ":")).encode()])
                prune(self._folder)


def _is_our_own(request: Request, plugins: Plugins) -> bool:
    """Whether all code that the plan can depend on belongs to this package."""
    distributions = {p.distribution for p in plugins.patterns} | {plugins.cost_model(request.settings.cost_model).distribution}
    return not request.patterns and not plugins.op_names and distributions <= {_OWN_DISTRIBUTION}


def _digest(graph: Graph, request: Request, plugins: Plugins) -> str:
    settings = replace(request.settings, **_WITHOUT_INFLUENCE)
    others = {f.name: getattr(request, f.name) for f in fields(request) if f.name not in ("settings", "progress")}
    parts = (
        (graph.tensors, graph.ops, graph.loss, graph.batch.size, sorted(graph.batch.inputs), graph.assumed),
        (settings, others, request.cluster.to_dict()),
        [(p.name, p.version) for p in plugins.patterns],
    )
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


@cache
def _code() -> str:
    """A digest of this package's files."""
    digest = blake2b(digest_size=16)
    for package in _OWN_PACKAGES:
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            for path in sorted(p for p in Path(folder).rglob("*") if p.suffix in (".py", ".yaml", ".json")):
                digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
