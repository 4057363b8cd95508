"""Patterns as their authors write them, and the check that each passes before it is used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from paddle_rbt_plugin.errors import PatternError, describe_error
from paddle_rbt_plugin.graph.graph import Graph, Op, Tensor
from paddle_rbt_plugin.pattern.builder import Builder, PatternGraph, TensorNode, variants
from paddle_rbt_plugin.pattern.spec import Spec, check_spec, expand

_NAME = re.compile(r"[A-Za-z_][\w.-]*")


class Pattern:
    """A sub-graph that an expert knows how to shard. Subclass it, draw the graph in ``build``, say in ``shard`` how its
    tensors are sharded, and register the class in a plugin's ``register_patterns`` hook."""

    name: str = ""
    """Unique among all patterns; appears in plans and messages."""

    priority: int = 0
    """Where two patterns claim one tensor in different ways, the larger priority wins."""

    spans_layers: bool = False
    """True for a pattern that joins ops of different layers on purpose, as a tied embedding does."""

    shard: Any = None
    """Shard spec per named tensor, ``{"x": ("dp", ..., None)}``; or a method ``shard(self, match)`` that returns such a
    dict, where ``match`` is an ``Occurrence``; an empty one says that this place is none of the pattern's business."""

    dim_names: Mapping[str, tuple[Any, ...]] = {}
    """What the dimensions of a named tensor are, for messages: ``{"weight": ("vocabulary", None)}``; ``...`` as in specs."""

    def build(self, g: Builder) -> None:
        """Draws the pattern graph with the builder ``g``. Called once per combination of ``g``'s choices."""
        raise NotImplementedError(f"{type(self).__name__} draws no graph: it must define build(self, g)")


@dataclass(frozen=True)
class Occurrence:
    """One place where a pattern graph occurs: what a ``shard`` method decides by."""

    graph: Graph
    tensors: Mapping[str, int]
    """Named pattern tensor -> position in the graph; optional tensors only where present."""

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def tensor(self, name: str) -> Tensor:
        """The program's tensor, with its shape and dtype. Raises KeyError for one that is not there."""
        return self.graph.tensors[self.tensors[name]]

    def producer(self, name: str) -> Op | None:
        """The op that writes the tensor, with its attributes; None for a parameter or an input."""
        return self.graph.producer(self.tensors[name])


@dataclass(frozen=True)
class CompiledPattern:
    """A checked pattern with the graphs it stands for and the package it came from."""

    pattern: Pattern
    variants: tuple[PatternGraph, ...]
    distribution: str = ""
    version: str = ""
    entry_point: str = ""

    @property
    def name(self) -> str:
        return self.pattern.name

    @property
    def source(self) -> str:
        """The package it came from, as messages say it; empty for a class that no plugin registered."""
        return f"{self.distribution} {self.version}, entry point {self.entry_point!r}" if self.distribution else ""

    @cached_property
    def nodes(self) -> dict[str, TensorNode]:
        """All tensors that the pattern can name, those of optional parts included."""
        return {name: node for graph in self.variants for name, node in graph.names.items()}

    def specs(self, occurrence: Occurrence) -> dict[str, Spec]:
        """Shard specs of the tensors present in one occurrence. Raises PatternError when ``shard`` answers nonsense."""
        shard = self.pattern.shard
        if callable(shard):
            shard = _check_shard(self.name, shard(occurrence), self.nodes)
        return {name: spec for name, spec in shard.items() if name in occurrence.tensors}


def compile_pattern(cls: Any, distribution: str = "", version: str = "", entry_point: str = "") -> CompiledPattern:
    """Checks a pattern class and draws its graphs; the other arguments say which package it came from.

    Raises PatternError, with the pattern's name, for whatever is malformed: not a Pattern subclass, no name, a ``build``
    that raises or draws no proper graph, no shard spec, a spec that names a tensor the pattern lacks or does not fit it.
    """
    if not (isinstance(cls, type) and issubclass(cls, Pattern)):
        raise PatternError(f"register() takes a subclass of Pattern, not {cls!r}")
    where = cls.__name__
    if not isinstance(cls.name, str) or not _NAME.fullmatch(cls.name):
        raise PatternError(f"{where}: a pattern needs a name of letters, digits, '_', '-' and '.', not {cls.name!r}")
    if not isinstance(cls.priority, int):
        raise PatternError(f"pattern {cls.name!r}: priority is an integer, not {cls.priority!r}")
    try:
        pattern = cls()
        graphs = tuple(variants(pattern.build))
    except PatternError as error:
        raise PatternError(f"pattern {cls.name!r}: {error}") from error
    except (Exception, SystemExit) as error:
        raise PatternError(f"pattern {cls.name!r}: build() raised {describe_error(error)}") from error
    compiled = CompiledPattern(pattern, graphs, distribution, version, entry_point)
    if not callable(pattern.shard):
        if not pattern.shard:
            raise PatternError(f"pattern {cls.name!r} has no shard spec: shard must be a dict of specs by tensor, or a method")
        _check_shard(cls.name, pattern.shard, compiled.nodes)
    _check_dim_names(cls.name, pattern.dim_names, compiled.nodes)
    return compiled


def _check_shard(pattern: str, shard: Any, nodes: Mapping[str, TensorNode]) -> dict[str, Spec]:
    if not isinstance(shard, Mapping):
        raise PatternError(f"pattern {pattern!r}: shard is a dict from named tensors to specs, not {shard!r}")
    return {
        name: check_spec(spec, _node(pattern, "shard", name, nodes).ndim, f"pattern {pattern!r}, tensor {name!r}")
        for name, spec in shard.items()
    }


def _check_dim_names(pattern: str, dim_names: Any, nodes: Mapping[str, TensorNode]) -> None:
    if not isinstance(dim_names, Mapping):
        raise PatternError(f"pattern {pattern!r}: dim_names is a dict from named tensors to tuples of names, not {dim_names!r}")
    for name, dims in dim_names.items():
        node = _node(pattern, "dim_names", name, nodes)
        if not isinstance(dims, tuple) or sum(d is ... for d in dims) > 1:
            raise PatternError(f"pattern {pattern!r}, tensor {name!r}: dim_names is a tuple of names and Nones, not {dims!r}")
        if node.ndim is not None:
            expand(dims, node.ndim, f"pattern {pattern!r}, dim_names of tensor {name!r}")


def _node(pattern: str, field: str, name: str, nodes: Mapping[str, TensorNode]) -> TensorNode:
    if name in nodes:
        return nodes[name]
    close = get_close_matches(str(name), nodes, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"it names {', '.join(map(repr, nodes)) or 'none'}"
    raise PatternError(f"pattern {pattern!r}: {field} names {name!r}, which the pattern's graph lacks; {hint}")
