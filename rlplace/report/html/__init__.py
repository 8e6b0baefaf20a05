"""A run as one HTML page. A section is a function and a row of `page.SECTIONS`; texts go through `figure.escaped`."""

from rlplace.report.html.page import report_page
from rlplace.report.html.run_data import RunData

__all__ = ["RunData", "report_page"]
