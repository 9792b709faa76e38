"""The language of a document that does not say it, against py3langid's own names and the texts of the Declaration."""
import gzip
import json
import sys

import pytest

from conftest import script
from corpus import language
from corpus.language import FINEWEB, detect

# Article 1 of the Universal Declaration of Human Rights.
ARTICLE = {
    "eng_Latn":
        "All human beings are born free and equal in dignity and rights. They are endowed with "
        "reason and conscience and should act towards one another in a spirit of brotherhood.",
    "deu_Latn":
        "Alle Menschen sind frei und gleich an W\u00fcrde und Rechten "
        "geboren. Sie sind mit Vernunft und Gewissen begabt und "
        "sollen einander im Geiste der Br\u00fcderlichkeit begegnen.",
    "fra_Latn":
        "Tous les \u00eatres humains naissent libres et \u00e9gaux en dignit\u00e9 "
        "et en droits. Ils sont dou\u00e9s de raison et de conscience et "
        "doivent agir les uns envers les autres dans un esprit de "
        "fraternit\u00e9.",
    "ita_Latn":
        "Tutti gli esseri umani nascono liberi ed eguali in dignit\u00e0 e "
        "diritti. Essi sono dotati di ragione e di coscienza e devono "
        "agire gli uni verso gli altri in spirito di fratellanza.",
    "rus_Cyrl":
        "\u0412\u0441\u0435 \u043b\u044e\u0434\u0438 "
        "\u0440\u043e\u0436\u0434\u0430\u044e\u0442\u0441\u044f "
        "\u0441\u0432\u043e\u0431\u043e\u0434\u043d\u044b\u043c\u0438 \u0438 "
        "\u0440\u0430\u0432\u043d\u044b\u043c\u0438 \u0432 \u0441\u0432\u043e\u0435\u043c "
        "\u0434\u043e\u0441\u0442\u043e\u0438\u043d\u0441\u0442\u0432\u0435 \u0438 "
        "\u043f\u0440\u0430\u0432\u0430\u0445.",
    "srp_Latn":
        "Sva ljudska bi\u0107a ra\u0111aju se slobodna i jednaka u dostojanstvu "
        "i pravima. Ona su obdarena razumom i sve\u0161\u0107u i treba jedni "
        "prema drugima da postupaju u duhu bratstva.",
}


def test_article_1_is_in_its_language_and_the_names_are_those_of_py3langid():
    """zxx is no language. Serbian in Latin script is told from Croatian by nobody."""
    pytest.importorskip("py3langid")
    assert set(language.identifier().labels) == {*FINEWEB, "zxx"}
    for name in ARTICLE.keys() - {"srp_Latn"}:
        assert detect(ARTICLE[name], 0.5) == name


class Sure:
    """An identifier that says what it is told to."""

    def __init__(self, *answer):
        self.answer = answer

    def classify(self, text):
        return self.answer


@pytest.mark.parametrize("answer, least, want", [
    (("de", 0.9), 0.9, "deu_Latn"), (("de", 0.89), 0.9, ""), (("zxx", 1.0), 0.5, ""),
    (("sr", 1.0), 0.5, "srp_Latn"), (("zh", 1.0), 0.5, "cmn_Hani")])
def test_a_language_is_believed_from_a_probability_on_and_has_the_script_of_the_text(monkeypatch, answer, least, want):
    monkeypatch.setattr(language, "identifier", lambda: Sure(*answer))
    assert detect(ARTICLE["srp_Latn"], least) == want
    assert want[:4] != "srp_" or detect(ARTICLE["rus_Cyrl"], least) == "srp_Cyrl"


def test_without_the_package_one_line_says_what_to_install(tmp_path, monkeypatch):
    language.identifier.cache_clear()
    monkeypatch.setitem(sys.modules, "py3langid", None)
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    (tmp_path / "a.txt").write_text("text")
    done = script("prepare.py", tmp_path / "a.txt", "--detect_language=0.9", f"--out={tmp_path / 'out'}")
    assert done.returncode == 2 and "pip install py3langid==" in done.stderr and done.stderr.count("\n") == 1


def test_prepare_asks_where_no_column_says_it(tmp_path, monkeypatch):
    """What a column says, and that code is code, stays; what is not sure gets the default."""
    said = {"All": ("en", 0.9), "Alle": ("de", 0.6), "Tous": ("fr", 0.5), "12": ("la", 0.4), '"""All': ("en", 0.9)}

    class FirstWord:
        classify = staticmethod(lambda text: said[text.split()[0]])
    monkeypatch.setattr(language, "identifier", FirstWord)
    rows = [dict(text=ARTICLE[name]) for name in ("eng_Latn", "deu_Latn", "fra_Latn")]
    rows += [dict(text=ARTICLE["deu_Latn"] + " x", lang="gsw_Latn"), dict(text="12 34 56 78")]
    (tmp_path / "in").mkdir()
    with open(tmp_path / "in" / "d.jsonl", "w") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "in" / "a.py").write_text(f'"""{ARTICLE["eng_Latn"]}"""\n')
    done = script("prepare.py", tmp_path / "in", "--detect_language=0.5",
                  "--keep_languages=deu_Latn,fra_Latn,code,other", "--default_language=other",
                  "--tokenizer=byte", f"--out={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    with gzip.open(tmp_path / "out" / "removed.jsonl.gz", "rt") as lines:
        removed = {row["id"] for row in map(json.loads, lines)}
    assert removed == {"d.jsonl:0", "d.jsonl:3"}
    table = json.loads((tmp_path / "out" / "report.json").read_text())["table"]
    assert {row["language"]: row["documents"] for row in table if row["documents"]} == dict(
        code=1, deu_Latn=1, fra_Latn=1, other=1)
