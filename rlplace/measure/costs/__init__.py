"""Seconds of every op on every device.

The table (`costs`), by roofline (`estimate`), or from real steps (`profile`), and the scratch that ops take
(`workspaces`).
"""
