"""Random opt-outs, stores, removals and folders that are there already, against the verdict on each row alone."""

import json
import os
from contextlib import suppress
from itertools import product
from pathlib import Path

from corpora import fill, ledger, put, report, write_form, write_lines
from draws import drawn
from hypothesis.strategies import lists, none, sampled_from, tuples
from test_pairs_corpus import number

from corpus.folder import building, publish
from corpus.reservations import refusal
from corpus.robots import AGENTS, may_train_on, open_robots, verdict
from corpus.statements import has_statements

# ----------------------------------------------------------------------------------------------------------------------
# opt-outs


HOSTS = "a.example", "www.b.example", "sub.c.example", "d.example"
# None: the store has no file of the host.
ROBOTS = [
    None,
    None,
    "",
    "",
    "<html>",
    "User-agent: *\nDisallow: /x",
    "User-agent: GPTBot\nDisallow: /",
    "User-agent: Mine\nDisallow: /",
    "User-agent: *\nContent-Usage: /x train-ai=n",
]
RESERVED = [None, '[{"location": "/x", "tdm-reservation": 1}]', "User-agent: Mine\nDisallow: /"]
STATEMENTS = [
    {},
    {},
    dict(headers="X-Robots-Tag: noindex, noai"),
    dict(headers='[["TDM-Reservation", "0"]]'),
    dict(metas=[["robots", "noai"]]),
    dict(metas=[["robots", "index"]]),
    dict(x_robots_tag="Mine: noml"),
    dict(content_usage="train-ai=n"),
    dict(tdm_reservation="1"),
    dict(meta_robots="noimageai"),
    dict(meta_tdm_reservation="1"),
]
FILES_OF_HOSTS = tuples(*[sampled_from(ROBOTS)] * 4)


@drawn(
    9,
    pages=lists(
        tuples(sampled_from([*HOSTS, "a..b", None]), sampled_from(["", "/x"]), sampled_from(STATEMENTS)),
        min_size=12,
        max_size=20,
    ),
    form=sampled_from(["jsonl", "jsonl.gz", "json", "parquet", "parquet", "csv"]),
    url_field=sampled_from(["url", "link"]),
    before=FILES_OF_HOSTS,
    after=FILES_OF_HOSTS,
    missing=sampled_from(["allow", "deny", "deny", ""]),
    agents=sampled_from([None, ["Mine"], ["GPTBot", "Mine"]]),
    reserved=none() | tuples(*[sampled_from(RESERVED)] * 4),
    blocked=sampled_from([(), ("c.example",)]),
)
def test_each_row_has_its_own_verdict_in_any_form_and_again_by_a_newer_store(
    tmp_path_factory, pages, form, url_field, before, after, missing, agents, reserved, blocked
):
    """missing: "" is a run without a store. The first two rows always stay: for validation and for training."""
    folder, fine = tmp_path_factory.mktemp("opt_outs"), "fine.example"
    pages = [(fine, "/x", {}), (fine, "", {}), *pages]
    texts = sorted((f"text {n}" for n in range(len(pages))), key=number)
    rows = [
        dict(text=text, url=host and f"https://{host}{path}", **statement)
        for text, (host, path, statement) in zip(texts, pages)
    ]
    if form == "csv":
        rows = [{name: value for name, value in row.items() if name != "metas"} for row in rows]

    def store(name, files):
        known = {fine: "", **{host: file for host, file in zip(HOSTS, files) if file is not None}}
        write_lines(folder / name, [dict(domain=host, content=file) for host, file in known.items()])
        return known

    how = ["--val_share=0", f"--url_field={url_field}"]
    of_robots = dict(store=None, agents=agents or AGENTS, missing="allow", blocked=blocked)
    if missing:
        of_robots |= dict(store=store("before.jsonl", before), missing=missing)
        how += [f"--robots={folder}/before.jsonl", f"--missing={missing}"]
    if reserved:
        files = {"tdmrep.json": {}, "ai.txt": {fine: ""}}
        for host, file in zip(HOSTS, reserved):
            if file:
                files["ai.txt" if file.startswith("User") else "tdmrep.json"][host] = file
        entries = [dict(domain=h, file=name, content=file) for name, of in files.items() for h, file in of.items()]
        how += [f"--reservations={write_lines(folder / 'reserved.jsonl', entries)}"]
    if blocked:
        how += [f"--blocked={folder}/blocked"]
        (folder / "blocked").write_text("\n".join(blocked))
    if agents and (missing or reserved):
        how += [f"--agents={folder}/agents"]
        (folder / "agents").write_text("\n".join(agents))
    else:
        of_robots["agents"] = AGENTS
    stored = [{url_field if name == "url" else name: value for name, value in row.items()} for row in rows]
    fill(folder / "out", write_form(folder / f"in.{form}", stored), *how)
    reasons = [refusal(row, of_robots, files if reserved else None) or "" for row in rows]
    assert [row["reason"] for row in ledger(folder / "out")] == reasons
    found = report(folder / "out")["robots"]
    assert found["statements"] == sum(map(has_statements, rows))
    hosts = [(host, reason) for (host, *_), reason in zip(pages, reasons)]
    for name, host in dict(without_url=None, unreadable_url="a..b").items():
        assert report(folder / "out")[name] == hosts.count((host, ""))
    of_robots |= dict(store=store("after.jsonl", after), missing="allow", blocked=())
    for n, row in enumerate(rows):
        reason = not reasons[n] and refusal(dict(url=row["url"]), of_robots)
        reasons[n] = f"withdrawn:{reason}" if reason else reasons[n]
    if any(reason.startswith("withdrawn") for reason in reasons):
        fill(folder / "out", f"--remove={folder}/after.jsonl")
        assert [row["reason"] for row in ledger(folder / "out")] == reasons


SERVED = "", "User-agent: *\nDisallow: /x", "User-agent: *\nDisallow: /", "<html>"


@drawn(99, served=lists(tuples(sampled_from(["2024-01-31", "2025-06-01", ""]), sampled_from(SERVED)), min_size=3))
def test_of_the_rows_of_a_host_any_refuses_or_the_latest_decides(tmp_path_factory, served):
    """In any order, also if a host has served one file twice, and another between. Of one date the last row counts."""
    rows = [dict(domain="a.example", date=date, content=content) for date, content in served]
    path = write_lines(tmp_path_factory.mktemp("served") / "s.jsonl", rows)
    _, _, latest = max((date, n, content) for n, (date, content) in enumerate(served))
    for snapshots, files in dict(any=[content for _, content in served], last=[latest]).items():
        store = open_robots(path, snapshots)
        for page in ("https://a.example/", "https://a.example/x"):
            assert verdict(page, store)[0] == all(may_train_on(page, content)[0] for content in files)


# ----------------------------------------------------------------------------------------------------------------------
# folders


META = json.dumps(dict(sources=dict(a=dict(train=dict(shards=[dict(file="train_00000.npy")])))))
WRITTEN = "documents.parquet", "report.json", "report.md", "tokenizer.json", "probes.json", "train_00000.npy"
WHOLE = dict.fromkeys(WRITTEN, "") | {"meta.json": META}
# Files of OUT, and why it is not replaced: the rest of them, a file in OUT.tmp, an input, a file that appears.
FOLDERS = [
    *[(dict(old=old), True) for old in (WHOLE, {}, {"meta.json": META, "report.json": ""})],
    *[
        (dict(old={file: WHOLE[file] for file in WHOLE if file != lost}), False)
        for lost in ("report.json", "meta.json")
    ],
    *[(dict(old=WHOLE | {"meta.json": damaged}), False) for damaged in ("{", "[]")],
    *[
        (dict(old=WHOLE | {file: ""}), False)
        for file in ("notes.txt", ".hidden", "train_00001.npy", "meta.json.bak", "folder/report.md")
    ],
    *[(dict(work=work), True) for work in ([".prepare.lock"], [".prepare.lock", "work/x"])],
    *[(dict(work=work), False) for work in (["work/x"], ["notes.txt"])],
    *[(dict(source=source), False) for source in ("out", "out/in", "REAL.tmp/in", ".")],
    (dict(late="late.txt"), False),
]


def contents(folder):
    return {str(path): path.is_file() and path.read_bytes() for path in sorted(Path(folder).rglob("*"))}


def test_a_folder_is_replaced_only_if_all_of_it_is_what_prepare_writes(tmp_path):
    """By its own name and through a link. A folder that is not replaced stays as it was."""
    for n, ((how, replaced), linked) in enumerate(product(FOLDERS, (False, True))):
        root = tmp_path / str(n)
        real = put(root / ("disk" if linked else "out"), how.get("old", WHOLE))
        real.mkdir(parents=True, exist_ok=True)
        put(Path(f"{real}.tmp"), dict.fromkeys(how.get("work", ()), ""))
        if linked:
            (root / "out").symlink_to(real)
        source = root / how.get("source", "in").replace("REAL", str(real))
        before, done = contents(real), False
        with suppress(ValueError, OSError), building(f"{root}/out", [str(source)]) as (final, tmp):
            put(tmp, {"data/new": ""})
            put(final, {how[key]: "" for key in ("late",) if key in how})
            before = contents(real)
            publish(final, tmp)
            done = True
        assert done == replaced, how
        assert contents(real) == before or done and os.listdir(real) == ["new"]
