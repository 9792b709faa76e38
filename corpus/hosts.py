"""
The hosts and domains of a data folder, as tables of host or domain, documents and bytes next to its ledger.

    domains.csv            the tenth of the registered domains with the most kept text. The AI Act's public summary of
                           training content asks for it (art. 53(1)(d), the Commission's template)
    hosts_refused.csv      hosts that lost documents to opt-outs, and their losses
    hosts_unknown.csv      hosts without a robots.txt in the store, or whose file was not fetched
    hosts_unparsable.csv   hosts that served something else as robots.txt
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

# A list of --blocked is the user's choice, not a statement of a host.
OPT_OUTS = ("robots", *RESERVED)
# The share of all domains that the Commission's template for the public summary of training content lists (AI Act,
# art. 53(1)(d)); hosts or domains in a table of report.md.
TOP_SHARE, SHOWN = 0.1, 20
# The files that write_hosts() writes, and what report.md says of their hosts.
HOST_FILES = {
    "hosts_refused.csv": "lost documents to opt-outs",
    "hosts_unknown.csv": "have no robots.txt in the store, or it was not fetched",
    "hosts_unparsable.csv": "serve something else as robots.txt",
    "hosts_several.csv": "have different files in a store",
}


def write_hosts(folder, store, reservations):
    """
    Write HOST_FILES next to a ledger: documents and bytes of each host, those that it lost or those that came in.
    Returns how many hosts have a file in the stores, how many documents are kept of those without one, and the SHOWN
    hosts that lost the most bytes to opt-outs.

    store: open_robots(path) or None. reservations: open_reservations(path) or None.
    """
    seen, lost, kept = sizes_of_hosts(folder)
    by_state = hosts_by_state(seen, store)
    stores = reservations or {}
    several = {host: seen[host] for host in with_several_files(seen, [store, *stores.values()])}
    unknown, unparsable = (by_state[state] if store else {} for state in ("unknown", "unparsable"))
    tables = dict(zip(HOST_FILES, (lost, unknown, unparsable, several)))
    for file, sizes in tables.items():
        write_sizes(f"{folder}/{file}", "host", sizes)
    return dict(
        top_blocked_hosts=dict(largest(lost)[:SHOWN]),
        kept={state: sum(kept[host] for host in hosts) for state, hosts in by_state.items()},
        hosts=dict(seen=len(seen), **{state: len(hosts) for state, hosts in by_state.items()}, several=len(several),
                   blocked=len(lost)),
        reservations={file: sum(files.get(host) is not None for host in seen) for file, files in stores.items()},
        host_files={file: len(sizes) for file, sizes in tables.items() if sizes},
    )


def hosts_by_state(sizes, store):
    """{one of FILE_STATES: {host: size}} of {host: size}."""
    by_state = {state: {} for state in FILE_STATES}
    for host, size in sizes.items():
        by_state[file_state(host, store)][host] = size
    return by_state


def with_several_files(hosts, stores):
    """Those of the hosts with different files in one of the stores, of which some may be None."""
    stores = [store for store in stores if store]
    return [host for host in hosts if any(store.key_of(host) in store.several for store in stores)]


def sizes_of_hosts(folder):
    """({host: [documents, bytes]} that came in, the same of those lost to opt-outs, {host: kept documents})."""
    seen, lost, kept = {}, {}, Counter()
    for row in ledger_rows(folder, ["url", "reason", "bytes", "tokens"]):
        host = site_key(row["url"])
        if host and came_in(row):
            add_size(seen, host, row)
            if row["reason"].partition(":")[0] in OPT_OUTS:
                add_size(lost, host, row)
            kept[host] += not row["reason"]
    return seen, lost, kept


def write_domains(folder):
    """
    Write domains.csv next to a ledger: the TOP_SHARE of the registered domains with the most kept text. Returns how
    many there are and how many it lists, the bytes of both, the first SHOWN, and how many kept documents have no URL or
    one that cannot be read, so that no opt-out of a host was consulted for them.
    """
    sizes, without_url, unreadable_url = {}, 0, 0
    for row in ledger_rows(folder, ["url", "reason", "bytes"]):
        # Planted passages did not come in and have no bytes.
        if row["reason"] or not row["bytes"]:
            continue
        host = host_key(row["url"])
        without_url += not row["url"]
        unreadable_url += bool(row["url"]) and not host
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
        without_url=without_url,
        unreadable_url=unreadable_url)


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
