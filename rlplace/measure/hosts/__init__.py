"""Hosts: devices and the links between them.

The records (`host`), the time of a transfer (`route_figures`), this machine (`detect`, `present`, `lost`), host files
(`host_file`), presets, and the HOST words of every command (`resolve`). Importing it imports no torch.
"""
