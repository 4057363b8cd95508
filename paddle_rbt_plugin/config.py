"""The settings of the tuner: what ``strategy.tuning``, the pass and ``rbt.tune`` take, validated in one place."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from paddle_rbt_plugin.errors import TunerError

PASS_NAME = "rule_based_tuner"

LEVELS = ("o1", "o2", "o3")


@dataclass(frozen=True)
class Settings:
    """How to tune. Raises TunerError, which names the field and what would be right, for a wrong value."""

    level: str = "o1"
    cluster: Any = None
    """Whatever ``parse_cluster`` takes; None detects the devices of the running job."""
    cost_model: str = "analytic"
    """The name of a cost model: ``analytic``, ``paddle``, or that of a plugin."""
    search_space: Mapping[str, Any] | None = None
    memory_reserve: float = 0.1
    """Share of a device's memory that stays free, from 0 to less than 1."""
    save_path: str | None = None
    """Where the plan is written."""
    load_path: str | None = None
    """A saved plan to use instead of a search."""
    blocked_plugins: tuple[str, ...] = field(default=())
    time_limit: float | None = None
    """Seconds after which the search stops with the best plan so far; the plan says that it did."""
    verify: bool = True
    """Whether every process of a job compares its own program with the plan before the first step (``engine.guard``)."""

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise TunerError(f"unknown level {self.level!r}; choose {', '.join(map(repr, LEVELS))}")
        if not isinstance(self.cost_model, str):
            raise TunerError(f"cost_model is the name of a cost model, such as 'analytic', not {self.cost_model!r}")
        if isinstance(self.blocked_plugins, str):
            object.__setattr__(self, "blocked_plugins", (self.blocked_plugins,))
        elif self.blocked_plugins is None:
            object.__setattr__(self, "blocked_plugins", ())
        if not isinstance(self.blocked_plugins, (list, tuple, set)) or not all(
            isinstance(n, str) for n in self.blocked_plugins
        ):
            raise TunerError(f"blocked_plugins is a list of names, not {self.blocked_plugins!r}")
        reserve = self.memory_reserve
        if isinstance(reserve, bool) or not isinstance(reserve, (int, float)) or not 0 <= reserve < 1:
            raise TunerError(f"memory_reserve is a share of the device's memory, from 0 to less than 1, not {reserve!r}")
        limit = self.time_limit
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit >= 0):
            raise TunerError(f"time_limit is a number of seconds, at least 0, not {limit!r}")
        if not isinstance(self.verify, bool):
            raise TunerError(f"verify is True or False, not {self.verify!r}")
        if self.search_space is not None and not isinstance(self.search_space, Mapping):
            raise TunerError(f"search_space is a dict like {{'mp': [1, 2]}}, not {self.search_space!r}")
        for key in ("save_path", "load_path"):
            value = getattr(self, key)
            if value is not None and not isinstance(value, (str, os.PathLike)):
                raise TunerError(f"{key} is a path, not {value!r}")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The fields, in order."""
        return tuple(f.name for f in fields(cls))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Settings:
        """Settings from a dict; a value of None keeps the default. Raises TunerError for an unknown key."""
        known = cls.names()
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TunerError(f"the tuner has no setting {key!r}{hint} (it has {', '.join(known)})")
        return cls(**{k: v for k, v in values.items() if v is not None})
