"""A case of the benchmark suite: a model on a cluster, and the strategies that experts published for it.

Each is one YAML file; those of the suite are in ``cases/``, and a user's own file of the same form is run the same way:

    model: gpt-39b                        # as on the command line: a named model, a config file, package.module:function
    cluster: 64x8:A100-80G                # as on the command line, or a mapping
    global_batch: 1536
    precision: fp16                       # the best of the devices by default
    level: o1                             # as on the command line, and so are seq and search_space
    training: [fused_elementwise]         # what the training code does beyond the traced program: flags of ``Training``
    experts:                              # what it is compared with
    - strategy: {pp: 2, micro_batch: 4}   # dimensions of the search space; what it does not state is left to the planner
      source: arXiv 2104.04473, table 1
      measured_step_time_s: 14.45         # where it was published
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from paddle_rbt_plugin.cluster.strict import load_yaml
from paddle_rbt_plugin.cost.candidate import Training
from paddle_rbt_plugin.errors import TunerError
from paddle_rbt_plugin.file_schema import problem
from paddle_rbt_plugin.search import SearchSpace
from paddle_rbt_plugin.validation import nearest

CASES = Path(__file__).parent / "cases"
FLAGS = tuple(f.name for f in fields(Training) if f.default is False)
"""What training code may do that the traced program does not say."""


@dataclass(frozen=True)
class Expert:
    """A published strategy."""

    source: str
    strategy: Mapping[str, Any]
    """Dimensions of the search space, as far as the source states them."""
    measured_step_time_s: float | None = None


@dataclass(frozen=True)
class Case:
    """What is planned, and what the plan is compared with. Raises TunerError for an unknown training flag."""

    name: str
    model: str
    cluster: str | Mapping[str, Any]
    global_batch: int
    """Samples of one optimizer step."""
    seq: int | None = None
    precision: str | None = None
    """None for the best that the devices have."""
    level: str = "o1"
    search_space: Mapping[str, Any] = field(default_factory=dict)
    training: tuple[str, ...] = ()
    experts: tuple[Expert, ...] = ()

    def __post_init__(self) -> None:
        for flag in self.training:
            if flag not in FLAGS:
                raise TunerError(f"training: there is no {flag!r}; {nearest(flag, FLAGS)}")


def suite() -> tuple[Case, ...]:
    """All cases of the suite, GPT before LLaMA, small before large."""
    return tuple(_load(name) for name in sorted(_names(), key=_order))


def find_case(reference: str) -> Case:
    """A case of the suite by name, or one's own file. Raises TunerError with the nearest names, or with what is wrong where
    in the file."""
    if reference.endswith((".yaml", ".yml")):
        return load_case(Path(reference))
    if reference not in _names():
        raise TunerError(f"no benchmark case is named {reference!r}; {nearest(reference, _names())}; or give a file (.yaml)")
    return _load(reference)


def load_case(path: Path) -> Case:
    """The case that a file describes, named like the file. Raises TunerError that names the file and the field."""
    try:
        content = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise TunerError(f"the benchmark case {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if wrong := problem("paddle_rbt_plugin.bench", "case.schema.json", content):
        raise TunerError(f"{path} is not a benchmark case: {wrong}")
    _check_space(f"{path}: search_space", content.get("search_space"))
    for i, expert in enumerate(content.get("experts", ())):
        _check_space(f"{path}: experts/{i}/strategy", expert["strategy"])
    experts = tuple(Expert(**expert) for expert in content.get("experts", ()))
    values = content | {"training": tuple(content.get("training", ())), "experts": experts}
    try:
        return Case(name=path.stem, **values)
    except TunerError as error:
        raise TunerError(f"{path}: {error}") from error


def _check_space(where: str, space: Mapping[str, Any] | None) -> None:
    try:
        SearchSpace.parse(space)
    except TunerError as error:
        raise TunerError(f"{where}: {str(error).removeprefix('search_space: ')}") from error


def _names() -> list[str]:
    return [path.stem for path in CASES.glob("*.yaml")]


def _order(name: str) -> tuple[Any, ...]:
    """GPT before LLaMA, small before large."""
    family, size = name.split("-")[:2]
    return family[:3], float(size[:-1]) * {"m": 1e-3, "b": 1.0}[size[-1]], name


def _load(name: str) -> Case:
    return load_case(CASES / f"{name}.yaml")
