"""`report.html`: a run as one page. A section is a file and a row of `page.SECTIONS`; texts go through `escape`."""

from rlplace.report.html.page import report_page
from rlplace.report.html.run_data import RunData, decode_run

__all__ = ["RunData", "decode_run", "report_page"]
