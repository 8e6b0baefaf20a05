"""Placing again on other devices, from the state of a run: its costs, links, factors of its host, and best
placement."""
