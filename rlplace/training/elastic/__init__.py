"""Placing again on other devices, from the state of a run: its costs, links, factors of its host, and best placement.

`placed_again` reads the run and makes its problem on the other host, with figures from `carried`.
"""
