"""Hosts: devices and the links between them.

The records (`host`), what a transfer takes by them (`route_figures`), this machine (`detect`), host files
(`host_file`, `wiring`), presets, and the HOST words of every command (`resolve`). Importing it imports no torch.
"""
