"""Placements by a rule, without search: one device, blocks, by module as by hand, graph partitioners."""
