"""The audit: in = kept + removed to the byte, recounted from the files; what it says, and that it never says a text."""
import gzip
import json
import os
import shutil

import numpy as np
import pytest

from corpus import audit as report
from conftest import script

SECRET = "Confidential passage that no audit may repeat."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("audit")
    rows = [dict(id=i, text=f"{SECRET} Number {i}. " + "word " * (5 + i), lang=["deu_Latn", "roh_Latn"][i % 2], license=["mit", "cc0"][i % 3 > 0],
                 url=f"https://h{i % 3}.example/{i}", date=f"20{10 + i % 15}-05-01") for i in range(90)]
    rows += [dict(rows[5], id=1000), dict(rows[6], id=1001, text="  \n ")]
    with open(root / "d.jsonl", "w") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)
        f.write('{"text": ')
    with open(root / "robots.jsonl", "w") as f:
        f.write(json.dumps(dict(domain="h1.example", content="User-agent: CCBot\nUser-agent: GPTBot\nDisallow: /")) + "\n")
    done = script("prepare.py", root / "d.jsonl", f"--out={root / 'out'}", "--tokenizer=byte", f"--robots={root / 'robots.jsonl'}", "--keep_languages=deu_Latn,roh_Latn",
                  "--max_chars=500", "--source_by=license", pictures=True)
    assert done.returncode == 0, done.stderr
    return root / "out", rows, done.stdout


def load(folder):
    with open(folder / "report.json", encoding="utf-8") as f:
        return json.load(f)


def test_documents_and_bytes_in_are_those_of_the_input_and_all_are_accounted_for(folder):
    out, rows, _ = folder
    total = load(out)["total"]
    assert total["documents_in"] == len(rows) + 1 and total["bytes_in"] == sum(len(r["text"].encode()) for r in rows)
    for i, name in enumerate(("documents", "bytes")):
        assert total[f"{name}_in"] == total[name] + sum(row[i] for row in total["removed"].values())
    assert {reason: n for reason, (n, _) in total["removed"].items()} == dict(unreadable=1, empty=1, robots=30, length=sum(
        len(r["text"]) > 500 and i % 3 != 1 for i, r in enumerate(rows[:90])), duplicate=0 if 5 % 3 == 1 else 1)


def test_each_row_of_the_table_adds_up_and_the_rows_are_the_total(folder):
    account = load(folder[0])
    report.total(account["table"])                                               # raises where a sum is not one
    for row in account["table"]:
        assert row["documents_in"] == row["documents"] + sum(n for n, _ in row["removed"].values())
    assert {(r["source"], r["language"]) for r in account["table"] if r["documents"]} == {(s, l) for s in ("mit", "cc0") for l in ("deu_Latn", "roh_Latn")}


def test_tokens_are_counted_where_kept_and_estimated_where_removed_and_both_add_up(folder):
    account, page = load(folder[0]), open(folder[0] / "report.md", encoding="utf-8").read()
    total, rows = account["total"], account["table"]
    assert total["tokens"] == sum(s["tokens"] for s in account["outputs"]["shards"]) == sum(r["tokens"] for r in rows)
    assert total["tokens"] == total["bytes"] + 2 * total["documents"]                              # --tokenizer=byte: <s>, bytes, </s>
    for reason, (n, size) in total["removed"].items():
        about = total["tokens_removed_about"][reason]
        assert about == sum(r["tokens_removed_about"].get(reason, 0) for r in rows) and size <= about <= size * 1.05
        assert f"| {size / 1e6:,.2f} | \u2248 {about:,} |" in page or not about
    assert f"| \u2248 {total['tokens'] + sum(total['tokens_removed_about'].values()):,} |" in page


@pytest.mark.parametrize("tokens, says", [(10**9 - 1, "Less than 1 billion"), (10**9, "1 billion to 10 trillion"), (10**13, "1 billion to 10 trillion"),
                                          (10**13 + 1, "More than 10 trillion")])
def test_the_range_of_the_eu_form_is_the_one_that_the_tokens_fall_in(folder, tokens, says):
    account = load(folder[0])
    account["total"]["tokens"] = tokens
    assert f"Training data size: {says} tokens ({tokens:,} tokens of byte" in "\n".join(report.eu_summary(account))


def test_no_file_of_the_audit_holds_a_text(folder):
    for name in ("report.json", "report.md", "removed.jsonl.gz", "meta.json"):
        raw = open(folder[0] / name, "rb").read()
        assert b"Confidential" not in (gzip.decompress(raw) if name.endswith(".gz") else raw)


def test_the_opt_outs_are_named_by_host_and_agent_beside_the_published_shares(folder):
    out, rows, _ = folder
    block = load(out)["robots"]
    size = sum(len(r["text"].encode()) for i, r in enumerate(rows[:90]) if i % 3 == 1)
    assert block["top_blocked_hosts"] == {"h1.example": [30, size]} and block["removed_by_agent"] == {"CCBot": [30, size]}
    assert block["hosts"] == dict(seen=3, with_file=1, without=2, unparsable=0, blocked=1)
    assert block["share_of_bytes_removed"] == size / load(out)["total"]["bytes_in"] and block["published_share"] == dict(english=0.08, multilingual=0.04)
    assert len(block["agents"]) == 15 and len(block["sha256"]) == 64


def test_the_page_for_people_has_the_numbers_and_the_boxes_of_the_eu_form(folder):
    out = folder[0]
    page, account = open(out / "report.md", encoding="utf-8").read(), load(out)
    for says in (f"{account['total']['tokens']:,} tokens", "Less than 1 billion tokens", "collection for model training: 2024-05-01", "deu_Latn", "8 %", "4 %",
                 "| h1.example | 30 |", account["inputs"][0]["sha256"][:16], account["outputs"]["shards"][0]["sha256"][:16], "for 15 agents"):
        assert says in page, says
    assert open(out / "flow.png", "rb").read(8) == b"\x89PNG\r\n\x1a\n" and os.path.getsize(out / "flow.png") > 5000


def test_what_was_printed_is_the_sum(folder):
    t = load(folder[0])["total"]
    assert f"{t['documents_in']:,} documents in = {t['documents']:,} kept + 1 unreadable + 1 empty + 30 robots" in folder[2]


def damaged(folder, tmp_path, how):
    copy = tmp_path / "copy"
    shutil.copytree(folder[0], copy)
    how(copy)
    return script("corpus.audit", copy)


def one_more_removed(copy):
    with gzip.open(copy / "removed.jsonl.gz", "at") as f:
        f.write('{"id": "x", "reason": "robots"}\n')


def another_token(copy):
    path = next(copy.glob("*.npy"))
    shard = np.load(path, allow_pickle=False)
    shard[3] += 1
    np.save(path, shard)


def other_number(copy):
    account = load(copy)
    account["total"]["documents_in"] += 1
    (copy / "report.json").write_text(json.dumps(account))


def other_row(copy):
    account = load(copy)
    account["table"][0]["documents"] += 1
    (copy / "report.json").write_text(json.dumps(account))


def test_the_check_passes_on_what_was_written(folder):
    done = script("corpus.audit", folder[0])
    assert done.returncode == 0 and "all hashes as written" in done.stdout


@pytest.mark.parametrize("how, says", [(one_more_removed, "removed.jsonl.gz has"), (another_token, "another sha256"), (other_number, "not the total"),
                                       (other_row, "does not add up"), (lambda copy: os.remove(copy / "report.json"), "no report.json")])
def test_the_check_sees(folder, tmp_path, how, says):
    done = damaged(folder, tmp_path, how)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_without_a_robots_store_the_report_says_that_nobody_was_asked(tmp_path):
    (tmp_path / "a.txt").write_text("something")
    assert script("prepare.py", tmp_path / "a.txt", f"--out={tmp_path / 'out'}", "--tokenizer=byte").returncode == 0
    assert load(tmp_path / "out")["robots"] is None and "No robots.txt was consulted" in (tmp_path / "out" / "report.md").read_text()


def test_a_store_that_knows_none_of_the_hosts_is_called_so(folder):
    account = load(folder[0])
    assert "knows none of these hosts" not in report.markdown(account)
    account["robots"]["hosts"].update(with_file=0, without=3)
    assert "**The store knows none of these hosts**" in report.markdown(account)


@pytest.mark.parametrize("part, whole, says", [(0, 9, "0.0 %"), (1, 4597, "< 0.1 %"), (4596, 4597, "> 99.9 %"), (9, 9, "100.0 %"), (1, 3, "33.3 %"),
                                               (0, 0, "-"), (1, 2000, "0.1 %"), (1999, 2000, "> 99.9 %")])
def test_a_share_reads_as_nothing_or_all_only_if_it_is(part, whole, says):
    assert report.percent(part, whole) == says


def test_rows_where_the_numbers_do_not_add_up_are_refused():
    audit = report.Audit()
    audit.remove(("s", "de", ""), "robots:GPTBot:/x", 10)
    audit.keep(("s", "de", ""), 2, 30, 28, dict(email=1))
    assert report.total(audit.groups.values())["removed"] == {"robots": [1, 10]}
    audit.groups["s", "de", ""]["bytes_in"] += 1
    with pytest.raises(ValueError, match="41 bytes in, 30 kept, 10 removed"):
        report.total(audit.groups.values())


def test_what_was_removed_has_the_tokens_per_byte_of_what_was_kept_of_its_kind():
    """Of the same source, language and licence; of all together where nothing of it was kept."""
    kinds = [dict(report.empty(), tokens=10, bytes_written=100, removed=dict(robots=[1, 200])),
             dict(report.empty(), tokens=50, bytes_written=100, removed=dict(robots=[1, 200], empty=[1, 0])),
             dict(report.empty(), removed=dict(robots=[1, 200]))]
    for kind in kinds:
        kind["documents_in"], kind["bytes_in"] = len(kind["removed"]), 200
    report.estimate(kinds)
    assert [kind["tokens_removed_about"] for kind in kinds] == [dict(robots=20), dict(robots=100, empty=0), dict(robots=60)]


def heard(dates, blocked, hosts=()):
    outcomes = {"kept:allowed": [3, 30]}
    return dict(dates=dates, columns=[], robots=dict(outcomes=outcomes, blocked=blocked, agents={"GPTBot": [1, 5]}, hosts=dict(hosts)))


def test_the_page_says_what_the_batches_heard(tmp_path):
    """Every table of report.md, line by line, from numbers that were put in by hand."""
    audit = report.Audit()
    hosts = {f"h{i:02}.example": [1, 10 + i] for i in range(30)}
    audit.hear(heard(["2020-05-01", "2021-05-01"], hosts, dict(a="with", b="without")))
    audit.hear(heard([None, None], {}, dict(b="without", c="unparsable")))
    audit.hear(heard(["2019-01-01", "2020-01-01"], {"h03.example": [2, 1000]}))
    audit.keep(("web", "deu_Latn", "mit"), 2, 3_000_000, 2_900_000, dict(email=1))
    audit.keep(("web", "deu_Latn", ""), 3, 5_000_000, 5_000_000, dict(email=2, ip=4))
    audit.remove(("web", "roh_Latn", "cc0"), "robots:GPTBot:/x", 2_000_000, documents=7)
    for group, tokens in zip(audit.groups.values(), (700_000, 1_250_000, 0)):
        group["tokens"] = tokens
    files = [dict(name="a.jsonl", path="in/a.jsonl", bytes=10_000_000, sha256="ab" * 32, problem=None), dict(name="b", path="in/b", bytes=1, sha256=None, problem="binary")]
    run = dict(out="data/web", command="prepare.py in", tokenizer="apertus")
    outputs = dict(shards=[dict(file="train_00000.npy", tokens=1_950_000, sha256="cd" * 32)], rule="The rule.", halved=False, bos=1, eos=2)
    robots = dict(store="r", sha256="ef" * 32, date="2025-01-01", agents=["GPTBot", "*"], missing="allow", only_explicit=False)
    account = report.build(audit, run, files, outputs, robots, dict(scrubbed=True, in_code=True), None)

    assert account["dates"] == ["2019-01-01", "2021-05-01"]
    assert account["robots"]["hosts"] == dict(seen=3, with_file=1, without=1, unparsable=1, blocked=30)
    assert account["robots"]["outcomes"] == {"kept:allowed": [9, 90]} and account["robots"]["removed_by_agent"] == {"GPTBot": [3, 15]}
    assert account["robots"]["top_blocked_hosts"] == {"h03.example": [3, 1013]} | {f"h{i:02}.example": [1, 10 + i] for i in range(29, 10, -1)}
    assert account["robots"]["share_of_bytes_removed"] == 0.2
    assert account["licenses"] == {"": dict(documents=3, bytes=5_000_000, tokens=1_250_000), "cc0": dict(documents=0, bytes=0, tokens=0),
                                   "mit": dict(documents=2, bytes=3_000_000, tokens=700_000)}
    tables = [line for line in report.markdown(account).splitlines() if line.startswith("|") and "example" not in line]
    assert tables == [
        "|  | documents | of all | MB | tokens |", "|---|---|---|---|---|",
        "| came in | 12 |  | 10.00 | \u2248 2,443,671 |", f"| robots: {report.REASONS['robots']} | 7 | 58.3 % | 2.00 | \u2248 493,671 |",
        "| **kept** | **5** | 41.7 % | 8.00 | **1,950,000** |",
        "| host | documents | MB |", "|---|---|---|",
        "| source | language | documents in | removed | kept | MB kept | tokens | bytes/token |", "|---|---|---|---|---|---|---|---|",
        "| web | deu_Latn | 5 | - | 5 | 8.00 | 1,950,000 | 4.05 |", "| web | roh_Latn | 7 | robots 7 | 0 | 0.00 | 0 | 0.00 |",
        "| licence | documents | MB | tokens |", "|---|---|---|---|",
        "| not stated | 3 | 5.00 | 1,250,000 |", "| mit | 2 | 3.00 | 700,000 |",
        "| input | bytes | sha256 |", "|---|---|---|", "| a.jsonl | 10,000,000 | abababababababab |", "| b (binary) | 1 | ? |",
        "| shard | tokens | sha256 |", "|---|---|---|", "| train_00000.npy | 1,950,000 | cdcdcdcdcdcdcdcd |"]
    form = "\n".join(report.eu_summary(account))
    for says in ("1,950,000 tokens of apertus, 0.008 GB", "model training: 2021-05-01", "1 language, by size: deu_Latn.", "2 Data sources: a.jsonl. ",
                 "robots.txt of 1 hosts", "for 2 agents (GPTBot, *, ...); 7 documents removed. A host without a file was taken as not having opted out.",
                 "replaced: 3 e-mail addresses, 4 IP addresses, 0 IBANs"):
        assert says in form, says
