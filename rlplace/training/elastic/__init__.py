"""Placing again on other devices, from what a run knows: its costs, links, factors of its host, and best placement."""
