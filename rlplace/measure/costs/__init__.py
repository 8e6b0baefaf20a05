"""Seconds of every op on every device.

The table (`costs`), by roofline (`estimate`), or from real steps (`profile`); the links between devices (`links`).
"""
