"""`report.html`: a run as one page. A section is a file and a row of `page.SECTIONS`; texts go through `escape`."""

from rlplace.report.html.page import report_page
from rlplace.report.html.run_data import RunData

__all__ = ["RunData", "report_page"]
