"""The part of a report that the public summary of training content needs (AI Act, art. 53(1)(d)), and its files."""

import csv
import re
import textwrap

from corpora import fill, kept, report, text, write_lines

from corpus import robots
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


def test_the_period_is_of_days_between_the_web_and_today_and_says_how_many_have_none(tmp_path):
    """Of kept documents: the earliest day is of a removed one."""
    days = ["2024-05-01T08:00Z", "2025-02-03", "1970-01-01", "2999-01-01", "unknown", None]
    rows = [dict(text=text(n), date=day) for n, day in enumerate(days)]
    rows.append(dict(text=text(9), date="2001-01-01", headers={"X-Robots-Tag": "noai"}))
    fill(tmp_path / "out", write_lines(tmp_path / "in.jsonl", rows))
    assert report(tmp_path / "out")["period"] == ["2024-05-01", "2025-02-03"]
    page = (tmp_path / "out" / "report.md").read_text()
    assert "that only the provider can fill in:" in page and page.count("____") == 6
    assert "2024-05-01 to 2025-02-03" in page and "of 6 kept documents 4 have no date" in page


def test_hosts_are_those_of_the_data_and_counts_say_how_many_documents_are_kept(tmp_path):
    """Two licences of a host are not snapshots of one file; a list of --blocked is no opt-out of a host."""
    hosts = "page.org", "absent.org", "two.org", "blocked.org", "unread.org"
    rows = [dict(text=text(n), url=f"https://{host}/{n}") for n, host in enumerate(hosts)]
    rows += [dict(text=text(7), url="not a url"), dict(text=text(8)), dict(rows[0], id="copy")]
    rows[4]["headers"], copy = 7, dict(rows[4], id="again", headers=7)
    store = [dict(domain="page.org", content="<html>"), *(dict(domain=host, content="") for host in hosts[2:])]
    store += [dict(domain="elsewhere.org", content=content) for content in ("", "# another")]
    licences = [
        dict(domain="two.org", file=f"https://two.org/{n}.xml", content=f"<rsl><!-- {n} --></rsl>") for n in "ab"
    ]
    (tmp_path / "blocked").write_text("blocked.org")
    shown = fill(
        tmp_path / "out",
        write_lines(tmp_path / "in.jsonl", [*rows, copy]),
        f"--robots={write_lines(tmp_path / 'store.jsonl', store)}",
        f"--reservations={write_lines(tmp_path / 'licences.jsonl', licences)}",
        f"--blocked={tmp_path}/blocked",
    )
    assert (
        "robots.txt of 3 of 5 hosts (1 unknown: not in the store or not fetched, 1 document kept; 1 with something "
        "else in its place, 1 document kept; --missing=allow keeps their pages)"
    ) in shown
    assert "2 documents of 1 host: headers, <meta> or <link> that cannot be read; kept: 1" in shown
    assert "1 document has no URL: not checked" in shown and "1 document has a URL that cannot be read: not" in shown
    assert "different files" not in shown
    names = "host", "documents", "bytes"
    assert list(table(tmp_path / "out" / "hosts_unknown.csv", *names)) == ["absent.org"]
    assert list(table(tmp_path / "out" / "hosts_unparsable.csv", *names)) == ["page.org"]
    assert not list((tmp_path / "out").glob("hosts_[rs]*.csv"))


def test_a_report_of_opt_outs_has_the_table_of_signals_of_robots_py(tmp_path):
    signals = textwrap.dedent(re.search(r"    signal .*?\n(?=\n)", robots.__doc__, re.S)[0])
    rows, store = pages()[:9], [dict(domain="a.site0.co.uk", content="")]
    options = f"--robots={write_lines(tmp_path / 'store.jsonl', store)}"
    fill(tmp_path / "data", write_lines(tmp_path / "in.jsonl", rows), options)
    assert signals in (tmp_path / "data/report.md").read_text()
    fill(tmp_path / "plain", tmp_path / "in.jsonl")
    assert signals not in (tmp_path / "plain/report.md").read_text()
