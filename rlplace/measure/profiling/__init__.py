"""Seconds of ops and of links from real steps and real copies: `profile` by `metered_step`, `machine_links`."""
