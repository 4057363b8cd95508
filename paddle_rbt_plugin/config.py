"""The settings of the tuner, as ``strategy.tuning``, the pass and ``rbt.tune`` accept them, validated in one place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from pydantic import BeforeValidator, Strict

from paddle_rbt_plugin.validation import Kind, check_fields, check_known, number, one_of

PASS_NAME = "rule_based_tuner"

LEVELS = ("o1", "o2", "o3")


def _instance(*types: type) -> BeforeValidator:
    def is_one(value: Any) -> Any:
        if not isinstance(value, types):
            raise ValueError
        return value

    return BeforeValidator(is_one)


def _listed(value: Any) -> Any:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, set)) else value


_NAME = Annotated[str, Strict()]
_PATH = Kind("a path", Annotated[Any, _instance(str, os.PathLike, type(None))])


@dataclass(frozen=True)
class Settings:
    """How to tune. For a wrong value, raises TunerError, which names the field and what would be right."""

    level: Annotated[str, one_of(*LEVELS)] = "o1"
    cluster: Any = None
    """Any description that ``parse_cluster`` accepts; None detects the devices of the running job."""
    cost_model: Annotated[str, Kind("the name of a cost model, such as 'analytic'", _NAME)] = "analytic"
    """The name of a cost model: ``analytic``, ``paddle``, or that of a plugin."""
    search_space: Annotated[
        Mapping[str, Any] | None, Kind("a dict like {'mp': [1, 2]}", Annotated[Any, _instance(Mapping, type(None))])
    ] = None
    memory_reserve: Annotated[float, number("from 0 to less than 1", ge=0, lt=1)] = 0.1
    """Share of a device's memory that stays free, from 0 to less than 1."""
    save_path: Annotated[str | None, _PATH] = None
    """Where the plan is written."""
    load_path: Annotated[str | None, _PATH] = None
    """A saved plan to use instead of a search."""
    blocked_plugins: Annotated[
        tuple[str, ...], Kind("a list of names", Annotated[tuple[_NAME, ...], BeforeValidator(_listed)])
    ] = field(default=())
    time_limit: Annotated[float | None, number("of seconds, at least 0", finite=False, ge=0).or_none()] = None
    """Seconds after which the search stops with the best plan so far; a note in the plan says so."""
    verify: Annotated[bool, Kind("True or False", Annotated[bool, Strict()])] = True
    """Whether every process of a job compares its own program with the plan before the first step (``engine.guard``)."""
    cache: Annotated[
        bool | str | None, Kind("a folder, 'on' or 'off'", Annotated[Any, _instance(str, os.PathLike, bool, type(None))])
    ] = None
    """Where answers of Paddle are cached for later plans: a folder, or ``"off"``; None for the value of ``PADDLE_RBT_CACHE``,
    by default the user's cache folder (``completion.cache``)."""

    def __post_init__(self) -> None:
        check_fields(self)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The fields, in order."""
        return tuple(f.name for f in fields(cls))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Settings:
        """Settings from a dict; a value of None keeps the default. Raises TunerError for an unknown key."""
        check_known("the tuner has no setting", values, cls.names())
        return cls(**{k: v for k, v in values.items() if v is not None})
