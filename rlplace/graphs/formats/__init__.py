"""Graph files: `load_graph` and `save_graph`, and one module a format."""

from rlplace.graphs.formats.graph_files import ENDINGS, format_to_write, load_graph, load_times_s, save_graph

__all__ = ["ENDINGS", "format_to_write", "load_graph", "load_times_s", "save_graph"]
