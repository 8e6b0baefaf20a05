"""Seconds of every op on every device, by roofline, measured or given."""
