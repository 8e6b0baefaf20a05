"""Graph files: `load_graph` and `save_graph`, and one module a format."""

from rlplace.graphs.formats.dispatch import ENDINGS, load_graph, save_graph

__all__ = ["ENDINGS", "load_graph", "save_graph"]
