"""Hosts: devices and the links between them.

The records (`host`), this machine (`detect`), host files (`host_file`), presets, and the HOST words of every command
(`resolve`). Importing it imports no torch.
"""
