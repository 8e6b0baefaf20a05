"""What all pictures are drawn with: matplotlib, which obeys no `matplotlibrc` of the current folder.

That file may be a stranger's: it can make texts LaTeX's, and older versions of matplotlib evaluate parts of it.
"""

from __future__ import annotations

from rlplace.current_folder import unseen

with unseen("matplotlibrc"):
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
    from matplotlib.transforms import Bbox

__all__ = [
    "Axes",
    "Axis",
    "Bbox",
    "Figure",
    "FigureCanvasAgg",
    "FuncFormatter",
    "Line2D",
    "LogLocator",
    "MaxNLocator",
    "NullFormatter",
    "Patch",
    "PolyCollection",
]
