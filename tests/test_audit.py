"""The audit: in = kept + removed to the byte, recounted from the files; what it says, and that it never says a text."""
import gzip
import itertools
import json
import os
import shutil

import numpy as np
import pytest

from conftest import refused, script
from corpus import audit as report

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
    # The last line is torn.
    (root / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"text": ')
    refusal = dict(domain="h1.example", content="User-agent: CCBot\nUser-agent: GPTBot\nDisallow: /")
    (root / "robots.jsonl").write_text(json.dumps(refusal) + "\n")
    done = script("prepare.py", root / "d.jsonl", f"--out={root / 'out'}", "--tokenizer=byte", "--source_by=license",
                  "--max_chars=500", f"--robots={root / 'robots.jsonl'}")
    assert done.returncode == 0, done.stderr
    return root / "out", rows, done.stdout


def load(folder):
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


def test_documents_and_bytes_in_are_those_of_the_input_and_all_are_accounted_for(folder):
    out, rows, printed = folder
    account = load(out)
    total, table = account["total"], account["table"]
    assert (total["documents_in"], total["bytes_in"]) == (len(rows) + 1, bytes_of(rows))
    for group in (total, *table):
        for i, name in enumerate(("documents", "bytes")):
            assert group[f"{name}_in"] == group[name] + sum(row[i] for row in group["removed"].values())
    removed = {reason: n for reason, (n, _) in total["removed"].items()}
    long = sum(len(row["text"]) > 500 and row["id"] % 3 != 1 for row in rows[:90])
    assert removed == dict(unreadable=1, empty=1, robots=30, length=long, duplicate=1)
    kept = {(row["source"], row["language"]) for row in table if row["documents"]}
    assert kept == set(itertools.product(LICENSES, LANGUAGES))
    assert f"{total['documents_in']} documents in = {total['documents']} kept + 1 unreadable + 1 empty" in printed


def test_tokens_are_counted_where_kept_and_estimated_where_removed(folder):
    account = load(folder[0])
    total, rows, shards = account["total"], account["table"], account["outputs"]["shards"]
    assert total["tokens"] == sum(shard["tokens"] for shard in shards) == sum(row["tokens"] for row in rows)
    # --tokenizer=byte: <s>, the bytes, </s>.
    assert total["tokens"] == total["bytes"] + 2 * total["documents"]
    for reason, (_, size) in total["removed"].items():
        about = total["tokens_removed_about"][reason]
        assert about == sum(row["tokens_removed_about"].get(reason, 0) for row in rows)
        assert size <= about <= size * 1.05


def test_no_file_of_the_audit_holds_a_text(folder):
    for name in ("report.json", "report.md", "removed.jsonl.gz", "meta.json"):
        raw = (folder[0] / name).read_bytes()
        assert b"Confidential" not in (gzip.decompress(raw) if name.endswith(".gz") else raw)


def test_the_opt_outs_are_named_by_host_and_agent(folder):
    out, rows, _ = folder
    block, size = load(out)["robots"], bytes_of(rows[1:90:3])
    assert block["top_blocked_hosts"] == {"h1.example": [30, size]}
    assert block["removed_by_agent"] == {"CCBot": [30, size]}
    assert block["hosts"] == dict(seen=3, with_file=1, without=2, unparsable=0, blocked=1)
    assert block["share_of_bytes_removed"] == size / load(out)["total"]["bytes_in"]
    assert "| h1.example | 30 |" in (out / "report.md").read_text(encoding="utf-8")


def one_more_removed(copy):
    with gzip.open(copy / "removed.jsonl.gz", "at") as f:
        f.write('{"id": "x", "reason": "robots"}\n')


def another_token(copy):
    path = next(copy.glob("*.npy"))
    shard = np.load(path, allow_pickle=False)
    shard[3] += 1
    np.save(path, shard)


def another(part, *keys):
    """A report with one more at account[part]..."""
    def damage(copy):
        account = load(copy)
        table = account[part]
        for key in keys[:-1]:
            table = table[key]
        table[keys[-1]] += 1
        (copy / "report.json").write_text(json.dumps(account))
    return damage


@pytest.mark.parametrize("damage, says", [
    (lambda copy: None, ""),
    (one_more_removed, "removed.jsonl.gz has"),
    (another_token, "another sha256"),
    (another("total", "documents_in"), "not the total"),
    (another("table", 0, "documents"), "does not add up"),
    (lambda copy: os.remove(copy / "report.json"), "no report.json"),
])
def test_the_check_sees_what_is_not_as_it_was_written(folder, tmp_path, damage, says):
    copy = tmp_path / "copy"
    shutil.copytree(folder[0], copy)
    damage(copy)
    done = script("corpus.audit", copy)
    if says:
        refused(done, says)
    else:
        assert done.returncode == 0 and "all hashes as written" in done.stdout


def test_a_store_that_knows_none_of_the_hosts_or_was_not_asked_is_called_so(folder):
    account = load(folder[0])
    assert "knows none of these hosts" not in report.markdown(account)
    account["robots"]["hosts"].update(with_file=0, without=3)
    assert "**The store knows none of these hosts**" in report.markdown(account)
    assert "No robots.txt was consulted" in report.markdown(dict(account, robots=None))


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
    kinds = [dict(tokens=10, bytes_written=100), dict(tokens=50, bytes_written=100), dict()]
    came = dict(documents_in=1, bytes_in=200)
    kinds = [dict(report.empty(), removed=dict(robots=[1, 200]), **(came | kind)) for kind in kinds]
    report.estimate(kinds)
    assert [kind["tokens_removed_about"]["robots"] for kind in kinds] == [20, 100, 60]


def heard(blocked, **hosts):
    """What a batch says of its documents: three were allowed, and one was refused to GPTBot."""
    robots = dict(outcomes={"kept:allowed": [3, 30]}, blocked=blocked, agents={"GPTBot": [1, 5]})
    return dict(columns=[], hosts=hosts, robots=robots)


def test_what_the_batches_heard_is_added_up_and_the_hosts_that_lost_most_are_named():
    audit = report.Audit()
    hosts = {f"h{i:02}.example": [1, 10 + i] for i in range(30)}
    audit.hear(heard(hosts, a="with", b="without"))
    audit.hear(heard({}, b="without", c="unparsable"))
    audit.hear(heard({"h03.example": [2, 1000]}))
    audit.keep(("web", "deu_Latn", "mit"), 2, 8_000, 7_900, dict(email=1))
    for _ in range(4):
        audit.remove(("web", "roh_Latn", "cc0"), "robots:GPTBot:/x", 500)
    files = dict(shards=[], rule="", halved=False, bos=1, eos=2)
    account = report.build(audit, {}, [], {}, files, dict(store="r", agents=[], missing="allow"), {}, None)
    robots = account["robots"]
    assert robots["hosts"] == dict(seen=3, with_file=1, without=1, unparsable=1, blocked=30)
    assert robots["outcomes"] == {"kept:allowed": [9, 90]} and robots["removed_by_agent"] == {"GPTBot": [3, 15]}
    # The 20 that lost most; h03 lost documents in two batches.
    most = {"h03.example": [3, 1013]} | {f"h{i:02}.example": [1, 10 + i] for i in range(29, 10, -1)}
    assert robots["top_blocked_hosts"] == most and robots["share_of_bytes_removed"] == 0.2
