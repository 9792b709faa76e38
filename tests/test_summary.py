"""The part of a report that the public summary of training content needs (AI Act, art. 53(1)(d)), and its files."""

import csv

from corpora import fill, kept, report, text, write_lines

from corpus.hosts import registered_domain
from corpus.report import sized


def pages():
    """Pages of 40 domains under co.uk, each with 1 to 3 hosts."""
    return [
        dict(
            text=text(100 * i + j, 30 + 5 * i),
            url=f"https://{host}.site{i}.co.uk/",
            date=f"2024-0{j + 1}-1{i % 9}T08:00",
        )
        for i in range(40)
        for j, host in enumerate(("a", "b.c", "www")[: 1 + i % 3])
    ]


def table(path, *names):
    """{first column: the others as integers} of a CSV with these names."""
    with open(path, newline="") as f:
        rows = list(csv.reader(f))
    assert rows[0] == [*names]
    return {name: tuple(map(int, rest)) for name, *rest in rows[1:]}


def sums_of(rows, key):
    """{key(url): (documents, bytes)}, the most bytes first."""
    sums = {}
    for row in rows:
        n, size = sums.get(key(row["url"]), (0, 0))
        sums[key(row["url"])] = n + 1, size + row["bytes"]
    return dict(sorted(sums.items(), key=lambda item: (-item[1][1], item[0])))


def domain_of(url):
    return ".".join(url.split("/")[2].split(".")[-3:])


def host_of(url):
    return url.split("/")[2]


def test_the_report_has_domains_period_and_all_hosts_as_files(tmp_path):
    rows, refusing = pages(), "User-agent: *\nDisallow: /"
    hosts = sorted({host_of(row["url"]) for row in rows})
    store = [dict(domain=host, content=refusing if ".site0." in host else "") for host in hosts if "site1." not in host]
    store.append(dict(domain="a.site5.co.uk", content="# another"))
    robots = write_lines(tmp_path / "store.jsonl", store)
    out = tmp_path / "data"
    fill(out, write_lines(tmp_path / "in.jsonl", rows), f"--robots={robots}")
    domains, names = sums_of(kept(out), domain_of), ("domain", "documents", "bytes")
    assert list(table(out / "domains.csv", *names).items()) == list(domains.items())[:4] and len(domains) == 39
    unknown = {host for host in hosts if "site1." in host}
    assert set(table(out / "hosts_unknown.csv", "host", *names[1:])) == unknown
    assert set(table(out / "hosts_several.csv", "host", *names[1:])) == {"a.site5.co.uk"}
    assert list(table(out / "hosts_refused.csv", "host", *names[1:])) == ["a.site0.co.uk"]
    assert report(out)["period"] == ["2024-01-10", "2024-03-18"]
    page = (out / "report.md").read_text()
    name, (n, size) = next(iter(domains.items()))
    assert f"| {name} | {n} | {sized(size)} |" in page and "2024-01-10 to 2024-03-18" in page
    # A removal counts the domains anew and keeps the files about hosts.
    (tmp_path / "list").write_text(name)
    fill(out, f"--remove={tmp_path}/list")
    assert list(table(out / "domains.csv", *names).items()) == list(domains.items())[1:5]
    assert set(table(out / "hosts_unknown.csv", "host", *names[1:])) == unknown


def test_a_registered_domain_is_that_of_the_public_suffix_list():
    """Its own examples (publicsuffix.org/list, test_psl.txt), of the part for registries; an address is itself."""
    for host, domain in {
        "a.b.example.com": "example.com",
        "www.test.k12.ak.us": "test.k12.ak.us",
        "a.b.c.kobe.jp": "b.c.kobe.jp",
        "www.city.kobe.jp": "city.kobe.jp",
        "www.www.ck": "www.ck",
        "a.b.test.ck": "b.test.ck",
        "shishi.xn--55qx5d.cn": "shishi.xn--55qx5d.cn",
        "me.github.io": "github.io",
        "10.0.0.1": "10.0.0.1",
        "2001:db8::1": "2001:db8::1",
        "co.uk": "co.uk",
    }.items():
        assert registered_domain(host) == domain
