"""Placing again on other devices, from what a run knows: its costs, links, factors of its host, and best placement.

`known` reads a run folder, `devices` says which device of a new host stands for which of the old one, `figures` carries
costs, links and factors over, `op_types` estimates kinds of devices that nobody has measured, `fitted` learns from the
steps of a run that stopped early, `starts` carries the placement over, `replace` puts a problem together and searches,
`report` says what moved. `session` is what `rlplace place DIR` does, `elsewhere` trains on another host, and `offer` is
what a run that lost a device says.
"""
