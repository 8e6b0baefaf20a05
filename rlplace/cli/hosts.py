"""`rlplace hosts`: the machines that there are to place on."""

from __future__ import annotations

import tyro

from rlplace.cli.arguments import print_json
from rlplace.say import say


def hosts(name: tyro.conf.Positional[str] = "", json: bool = False) -> None:
    """List the words for this machine and the presets, or show one host.

    Args:
        name: a word for this machine (`auto`, `cores`, `cuda/2`, ...), a preset or a host file; empty lists them
        json: print one JSON object on stdout; that of one host is a host file
    """
    from rlplace.measure.hosts.host_file import host_to_dict
    from rlplace.measure.hosts.resolve import HOST_WORDS, describe_hosts, resolve_host

    if name:
        host = resolve_host(name)
        if json:
            print_json(host_to_dict(host))
            return
        for device in host.devices:
            say(f"{device.name:12} {device.kind:28} {device.memory_bytes / 2**30:8.1f} GiB")
        for link in host.links:
            say(f"{link.name:28} {link.bandwidth_bytes_per_s / 1e9:8.1f} GB/s {link.latency_s * 1e6:8.1f} us")
        return
    rows = describe_hosts()
    if json:
        print_json({"schema": 1, "words": HOST_WORDS, "hosts": rows})
        return
    for word, meaning in HOST_WORDS.items():
        say(f"{word:18} {meaning}")
    for row in rows:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in dict(row["kinds"]).items())  # type: ignore[call-overload]
        say(f"{row['name']:18} {kinds}")
