"""The device graphs of a model: explained, compared and verified."""

from __future__ import annotations

import html
import json
from typing import Any, Dict, List

from ._dacapo import Engine

__all__ = ["Difference", "Explanation", "Graphs", "Verification"]


class _Report:
    """Text for people, a dict for programs."""

    def __init__(self, text: str, data: Dict[str, Any]) -> None:
        self._text = text
        self._data = data

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__

    def to_dict(self) -> Dict[str, Any]:
        """The same as a dict."""
        return self._data

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self._text)}</pre>"


class Explanation(_Report):
    """The nodes of a graph: layer, kernel, grid, bytes, and where results lie. In a notebook it is a drawing."""

    def __init__(self, text: str, data: Dict[str, Any], svg: str) -> None:
        super().__init__(text, data)
        self.svg = svg

    @property
    def nodes(self) -> List[Dict[str, Any]]:
        """The nodes, in the order in which they run."""
        nodes: List[Dict[str, Any]] = self._data["nodes"]
        return nodes

    def _repr_svg_(self) -> str:
        return self.svg

    # Notebooks would prefer it to the drawing.
    _repr_html_ = None  # type: ignore[assignment]


class Difference(_Report):
    """The differences between two graphs."""

    @property
    def same(self) -> bool:
        """Whether there are none."""
        return not self._data["cuts"] and not self._data["plans"]


class Verification(_Report):
    """Replays compared with the same steps op by op."""

    @property
    def passed(self) -> bool:
        """Whether every byte was the same."""
        return bool(self._data["passed"])


class Graphs:
    """The device graphs of a model; `LLM.graphs`.

    A graph is named by its phase and size, `decode/8` or `prefill/512`, optionally with a backend
    (`decode/8/breakable`), a target (`@cpu`, `@h200`; without one it is the device that the model is on) and `+unfused`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def explain(self, graph: str) -> Explanation:
        """The nodes of a graph."""
        made = json.loads(self._engine.explain(graph))
        return Explanation(made["text"], made["data"], made["svg"])

    def diff(self, a: str, b: str) -> Difference:
        """The differences between two graphs."""
        made = json.loads(self._engine.diff(a, b))
        return Difference(made["text"], made["data"])

    def verify(self, **options: Any) -> Verification:
        """Runs every bucket and backend, replayed and op by op, and compares every byte.

        Loads the weights a second time. The options are those of `dacapo graph verify`, such as
        `buckets_decode="1,2"` and `backend="full"`.
        """
        from .calls import flags

        made = json.loads(self._engine.verify(flags(options)))
        return Verification(made["text"], made["data"])
