"""
The hosts and domains of a data folder, as tables of host or domain, documents and bytes next to its ledger.

    domains.csv            the tenth of the registered domains with the most kept text. The AI Act's public summary of
                           training content asks for it (art. 53(1)(d), the Commission's template)
    hosts_refused.csv      hosts that lost documents to opt-outs, and what they lost
    hosts_unknown.csv      hosts without a robots.txt in the store, or whose file was not fetched
    hosts_several.csv      hosts with different files in a store

All are sums over the ledger. A removal writes domains.csv anew; the others say what came in, and stay.
"""

import math
from collections import Counter
from functools import lru_cache

from publicsuffixlist import PublicSuffixList

from corpus.ledger import came_in, ledger_rows
from corpus.reservations import RESERVED
from corpus.robots import FILE_STATES, file_state
from corpus.urls import host_key, site_key
from engine.files import write_flushed

OPT_OUTS = ("robots", "blocked-domain", *RESERVED)
# The share of all domains that the Commission's template for the public summary of training content lists (AI Act,
# art. 53(1)(d)); hosts or domains in a table of report.md.
TOP_SHARE, SHOWN = 0.1, 20
# The files that write_hosts() writes, and what report.md says of their hosts.
HOST_FILES = {
    "hosts_refused.csv": "lost documents to opt-outs",
    "hosts_unknown.csv": "have no robots.txt in the store, or it was not fetched",
    "hosts_several.csv": "have different files in a store",
}


def write_hosts(folder, store, reservations):
    """
    Write HOST_FILES next to a ledger: documents and bytes of each host, those that it lost or those that came in.
    Returns how many hosts have a file in the stores, and the SHOWN hosts that lost the most bytes to opt-outs.

    store: open_robots(path) or None. reservations: open_reservations(path) or None.
    """
    seen, lost = sizes_of_hosts(folder)
    states = {host: file_state(host, store) for host in seen}
    unknown = {host: seen[host] for host, state in states.items() if store and state == "unknown"}
    stores = reservations or {}
    names = set().union(*(files.several for files in [store, *stores.values()] if files))
    several = {host: seen.get(host, [0, 0]) for host in names}
    tables = dict(zip(HOST_FILES, (lost, unknown, several)))
    for file, sizes in tables.items():
        write_sizes(f"{folder}/{file}", "host", sizes)
    count = Counter(states.values())
    return dict(
        top_blocked_hosts=dict(largest(lost)[:SHOWN]),
        hosts=dict(seen=len(seen), **{state: count[state] for state in FILE_STATES}, several=len(several),
                   blocked=len(lost)),
        reservations={file: sum(files.get(host) is not None for host in seen) for file, files in stores.items()},
        host_files={file: len(sizes) for file, sizes in tables.items() if sizes},
    )


def sizes_of_hosts(folder):
    """({host: [documents, bytes]} that came in, the same of those that opt-outs have removed)."""
    seen, lost = {}, {}
    for row in ledger_rows(folder, ["url", "reason", "bytes", "tokens"]):
        host = site_key(row["url"])
        if host and came_in(row):
            add_size(seen, host, row)
            if row["reason"].partition(":")[0] in OPT_OUTS:
                add_size(lost, host, row)
    return seen, lost


def write_domains(folder):
    """
    Write domains.csv next to a ledger: the TOP_SHARE of the registered domains with the most kept text. Returns how
    many there are and how many it lists, the bytes of both, the first SHOWN, and how many kept documents have no URL,
    so that no opt-out of a host was consulted for them.
    """
    sizes, without_url = {}, 0
    for row in ledger_rows(folder, ["url", "reason", "bytes"]):
        # Planted passages did not come in and have no bytes.
        if row["reason"] or not row["bytes"]:
            continue
        host = host_key(row["url"])
        without_url += not host
        if host:
            add_size(sizes, registered_domain(host), row)
    top = dict(largest(sizes)[:math.ceil(TOP_SHARE * len(sizes))])
    write_sizes(f"{folder}/domains.csv", "domain", top)
    return dict(
        domains=len(sizes),
        bytes=sum(size for _, size in sizes.values()),
        listed=len(top),
        listed_bytes=sum(size for _, size in top.values()),
        top=dict(largest(top)[:SHOWN]),
        without_url=without_url)


@lru_cache(1 << 16)
def registered_domain(host):
    """
    The name that the owner of a host has registered: a.b.example.co.uk -> example.co.uk, by the part of the Public
    Suffix List for registries (publicsuffix.org). An address stays as it is.
    """
    if ":" in host or host.rpartition(".")[2].isdigit():
        return host
    return suffix_list().privatesuffix(host) or host


@lru_cache(1)
def suffix_list():
    """The Public Suffix List that the package carries, read once; it is never fetched."""
    return PublicSuffixList(only_icann=True)


def add_size(sizes, name, row):
    """Add a document to {name: [documents, bytes]}."""
    size = sizes.setdefault(name, [0, 0])
    size[0] += 1
    size[1] += row["bytes"]


def largest(sizes):
    """The items of {name: [documents, bytes]}, the most bytes first, equal ones by name."""
    return sorted(sizes.items(), key=lambda item: (-item[1][1], item[0]))


def write_sizes(path, name, sizes):
    """Write {name: [documents, bytes]} as a table, the most bytes first; no file for none."""
    if sizes:
        rows = "".join(f"{key},{documents},{size}\n" for key, (documents, size) in largest(sizes))
        write_flushed(path, f"{name},documents,bytes\n{rows}")
