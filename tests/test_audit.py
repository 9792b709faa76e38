"""The audit: in = kept + removed to the byte, recounted from the files; what it says, and that it never says a text."""
import gzip
import itertools
import json
import os
import shutil

import numpy as np
import pytest

from corpus import audit as report
from conftest import script

SECRET = "Confidential passage that no audit may repeat."
LANGUAGES = ("deu_Latn", "roh_Latn")
LICENSES = ("mit", "cc0", "cc0")


def document(i):
    columns = dict(lang=LANGUAGES[i % 2], license=LICENSES[i % 3], date=f"20{10 + i % 15}-05-01")
    text = f"{SECRET} Number {i}. " + "word " * (5 + i)
    return dict(columns, id=i, text=text, url=f"https://h{i % 3}.example/{i}")


def bytes_of(rows):
    return sum(len(row["text"].encode()) for row in rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("audit")
    rows = [document(i) for i in range(90)]
    rows += [dict(rows[5], id=1000), dict(rows[6], id=1001, text="  \n ")]
    with open(root / "d.jsonl", "w") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)
        f.write('{"text": ')
    refusal = dict(domain="h1.example", content="User-agent: CCBot\nUser-agent: GPTBot\nDisallow: /")
    (root / "robots.jsonl").write_text(json.dumps(refusal) + "\n")
    rules = ["--keep_languages=deu_Latn,roh_Latn", "--max_chars=500", f"--robots={root / 'robots.jsonl'}"]
    where = [root / "d.jsonl", f"--out={root / 'out'}", "--tokenizer=byte", "--source_by=license"]
    done = script("prepare.py", *where, *rules, pictures=True)
    assert done.returncode == 0, done.stderr
    return root / "out", rows, done.stdout


def load(folder):
    with open(folder / "report.json", encoding="utf-8") as f:
        return json.load(f)


def test_documents_and_bytes_in_are_those_of_the_input_and_all_are_accounted_for(folder):
    out, rows, _ = folder
    total = load(out)["total"]
    # The last line of the file is torn.
    assert (total["documents_in"], total["bytes_in"]) == (len(rows) + 1, bytes_of(rows))
    for i, name in enumerate(("documents", "bytes")):
        assert total[f"{name}_in"] == total[name] + sum(row[i] for row in total["removed"].values())
    removed = {reason: n for reason, (n, _) in total["removed"].items()}
    long = sum(len(row["text"]) > 500 and row["id"] % 3 != 1 for row in rows[:90])
    assert removed == dict(unreadable=1, empty=1, robots=30, length=long, duplicate=1)


def test_each_row_of_the_table_adds_up_and_the_rows_are_the_total(folder):
    rows = load(folder[0])["table"]
    # total() raises where a sum is not one.
    report.total(rows)
    for row in rows:
        assert row["documents_in"] == row["documents"] + sum(n for n, _ in row["removed"].values())
    kept = {(row["source"], row["language"]) for row in rows if row["documents"]}
    assert kept == set(itertools.product(LICENSES, LANGUAGES))


def test_tokens_are_counted_where_kept_and_estimated_where_removed_and_both_add_up(folder):
    account, page = load(folder[0]), (folder[0] / "report.md").read_text(encoding="utf-8")
    total, rows, shards = account["total"], account["table"], account["outputs"]["shards"]
    assert total["tokens"] == sum(shard["tokens"] for shard in shards) == sum(row["tokens"] for row in rows)
    # --tokenizer=byte: <s>, the bytes, </s>.
    assert total["tokens"] == total["bytes"] + 2 * total["documents"]
    estimates = total["tokens_removed_about"]
    for reason, (_, size) in total["removed"].items():
        about = estimates[reason]
        assert about == sum(row["tokens_removed_about"].get(reason, 0) for row in rows)
        assert size <= about <= size * 1.05
        assert f"| {size / 1e6:,.2f} | \u2248 {about:,} |" in page or not about
    assert f"| \u2248 {total['tokens'] + sum(estimates.values()):,} |" in page


@pytest.mark.parametrize("tokens, says", [
    (10**9 - 1, "Less than 1 billion"), (10**9, "1 billion to 10 trillion"),
    (10**13, "1 billion to 10 trillion"), (10**13 + 1, "More than 10 trillion")])
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
    size = bytes_of(rows[1:90:3])
    assert block["top_blocked_hosts"] == {"h1.example": [30, size]}
    assert block["removed_by_agent"] == {"CCBot": [30, size]}
    assert block["hosts"] == dict(seen=3, with_file=1, without=2, unparsable=0, blocked=1)
    assert block["share_of_bytes_removed"] == size / load(out)["total"]["bytes_in"]
    assert block["published_share"] == dict(english=0.08, multilingual=0.04)
    assert len(block["agents"]) == 15 and len(block["sha256"]) == 64


def test_the_page_for_people_has_the_numbers_and_the_boxes_of_the_eu_form(folder):
    page, account = (folder[0] / "report.md").read_text(encoding="utf-8"), load(folder[0])
    hashes = [file["sha256"][:16] for file in (account["inputs"][0], account["outputs"]["shards"][0])]
    boxes = ["Less than 1 billion tokens", "collection for model training: 2024-05-01", "for 15 agents"]
    tokens = f"{account['total']['tokens']:,} tokens"
    for says in (tokens, "deu_Latn", "8 %", "4 %", "| h1.example | 30 |", *hashes, *boxes):
        assert says in page, says


def test_the_flow_is_drawn(folder):
    picture = (folder[0] / "flow.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and len(picture) > 5000


def test_each_bar_of_the_flow_is_what_is_left_and_behind_it_what_was_removed(by_hand, tmp_path, monkeypatch):
    """12 documents came in, robots.txt refused 7, and 5 are left."""
    drawn = []
    monkeypatch.setattr(report, "finish", lambda figure, path: drawn.extend(figure.axes[0].patches))
    report.picture(by_hand, tmp_path / "flow.png")
    bars = [(bar.get_x(), bar.get_width()) for bar in drawn]
    assert bars == [(0, 12), (12, 0), (0, 5), (5, 7), (0, 5), (5, 0)]


def test_what_was_printed_is_the_sum(folder):
    out, _, printed = folder
    t = load(out)["total"]
    sums = f"{t['documents_in']:,} documents in = {t['documents']:,} kept + 1 unreadable + 1 empty + 30 robots"
    assert sums in printed


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


@pytest.mark.parametrize("damage, says", [
    (one_more_removed, "removed.jsonl.gz has"), (another_token, "another sha256"), (other_number, "not the total"),
    (other_row, "does not add up"), (lambda copy: os.remove(copy / "report.json"), "no report.json")])
def test_the_check_sees(folder, tmp_path, damage, says):
    copy = tmp_path / "copy"
    shutil.copytree(folder[0], copy)
    damage(copy)
    done = script("corpus.audit", copy)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_without_a_robots_store_the_report_says_that_nobody_was_asked(tmp_path):
    (tmp_path / "a.txt").write_text("something")
    out = tmp_path / "out"
    assert script("prepare.py", tmp_path / "a.txt", f"--out={out}", "--tokenizer=byte").returncode == 0
    assert load(out)["robots"] is None
    assert "No robots.txt was consulted" in (out / "report.md").read_text()


def test_a_store_that_knows_none_of_the_hosts_is_called_so(folder):
    account = load(folder[0])
    assert "knows none of these hosts" not in report.markdown(account)
    account["robots"]["hosts"].update(with_file=0, without=3)
    assert "**The store knows none of these hosts**" in report.markdown(account)


@pytest.mark.parametrize("part, whole, says", [
    (0, 9, "0.0 %"), (1, 4597, "< 0.1 %"), (4596, 4597, "> 99.9 %"), (9, 9, "100.0 %"),
    (1, 3, "33.3 %"), (0, 0, "-"), (1, 2000, "0.1 %"), (1999, 2000, "> 99.9 %")])
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
    estimates = [kind["tokens_removed_about"] for kind in kinds]
    assert estimates == [dict(robots=20), dict(robots=100, empty=0), dict(robots=60)]


def heard(dates, blocked, hosts=()):
    """What a batch says of its documents: three were allowed, and one was refused to GPTBot."""
    outcomes, agents = {"kept:allowed": [3, 30]}, {"GPTBot": [1, 5]}
    robots = dict(outcomes=outcomes, blocked=blocked, agents=agents)
    return dict(dates=dates, columns=[], hosts=dict(hosts), robots=robots)


@pytest.fixture(scope="module")
def by_hand():
    """report.json from numbers that were put in by hand: three batches, three groups, 30 hosts that lost documents."""
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
    files = [
        dict(name="a.jsonl", path="in/a.jsonl", bytes=10_000_000, sha256="ab" * 32, problem=None),
        dict(name="b", path="in/b", bytes=1, sha256=None, problem="binary")]
    run = dict(out="data/web", command="prepare.py in", tokenizer="apertus")
    shard = dict(file="train_00000.npy", tokens=1_950_000, sha256="cd" * 32)
    outputs = dict(shards=[shard], rule="The rule.", halved=False, bos=1, eos=2)
    robots = dict(store="r", agents=["GPTBot", "*"], missing="allow")
    return report.build(audit, run, files, {".pdf": 2}, outputs, robots, dict(scrubbed=True, in_code=True), None)


def test_what_the_batches_heard_is_added_up(by_hand):
    robots = by_hand["robots"]
    assert by_hand["dates"] == ["2019-01-01", "2021-05-01"]
    assert robots["hosts"] == dict(seen=3, with_file=1, without=1, unparsable=1, blocked=30)
    assert robots["outcomes"] == {"kept:allowed": [9, 90]}
    assert robots["removed_by_agent"] == {"GPTBot": [3, 15]}
    # The 20 that lost most; h03 lost documents in two batches.
    most = {"h03.example": [3, 1013]} | {f"h{i:02}.example": [1, 10 + i] for i in range(29, 10, -1)}
    assert robots["top_blocked_hosts"] == most
    assert robots["share_of_bytes_removed"] == 0.2
    assert by_hand["licenses"] == {
        "": dict(documents=3, bytes=5_000_000, tokens=1_250_000),
        "cc0": dict(documents=0, bytes=0, tokens=0),
        "mit": dict(documents=2, bytes=3_000_000, tokens=700_000)}


TABLES = f"""
|  | documents | of all | MB | tokens |
|---|---|---|---|---|
| came in | 12 |  | 10.00 | \u2248 2,443,671 |
| robots: {report.REASONS['robots']} | 7 | 58.3 % | 2.00 | \u2248 493,671 |
| **kept** | **5** | 41.7 % | 8.00 | **1,950,000** |
| host | documents | MB |
|---|---|---|
| source | language | documents in | removed | kept | MB kept | tokens | bytes/token |
|---|---|---|---|---|---|---|---|
| web | deu_Latn | 5 | - | 5 | 8.00 | 1,950,000 | 4.05 |
| web | roh_Latn | 7 | robots 7 | 0 | 0.00 | 0 | 0.00 |
| licence | documents | MB | tokens |
|---|---|---|---|
| not stated | 3 | 5.00 | 1,250,000 |
| mit | 2 | 3.00 | 700,000 |
| input | bytes | sha256 |
|---|---|---|
| a.jsonl | 10,000,000 | abababababababab |
| b (binary) | 1 | ? |
| shard | tokens | sha256 |
|---|---|---|
| train_00000.npy | 1,950,000 | cdcdcdcdcdcdcdcd |
"""


def test_the_page_says_what_the_batches_heard(by_hand):
    """Every table of report.md, line by line, but for the rows of the hosts."""
    lines = report.markdown(by_hand).splitlines()
    tables = [line for line in lines if line.startswith("|") and "example" not in line]
    assert tables == TABLES.strip().splitlines()


@pytest.mark.parametrize("says", [
    "1,950,000 tokens of apertus, 0.008 GB", "model training: 2021-05-01", "1 language, by size: deu_Latn.",
    "2 Data sources: a.jsonl. ", "robots.txt of 1 hosts",
    "for 2 agents (GPTBot, *, ...); 7 documents removed. A host without a file was taken as not having opted out.",
    "replaced: 3 e-mail addresses, 4 IP addresses, 0 IBANs"])
def test_the_boxes_of_the_eu_form_say_what_the_batches_heard(by_hand, says):
    assert says in "\n".join(report.eu_summary(by_hand))
