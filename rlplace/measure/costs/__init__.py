"""Seconds of every op on every device: by roofline (`costs`), or from real steps (`profile`, `metered_step`)."""
