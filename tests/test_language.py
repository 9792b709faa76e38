"""Language identification against py3langid's own labels and Article 1 of the Universal Declaration of Human Rights."""

from types import SimpleNamespace

import pytest
from conftest import table

from corpus import language
from corpus.language import FINEWEB, detect

ARTICLE = {
    "eng_Latn": "All human beings are born free and equal in dignity and rights. They are endowed with "
    "reason and conscience and should act towards one another in a spirit of brotherhood.",
    "deu_Latn": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen begabt "
    "und sollen einander im Geiste der Brüderlichkeit begegnen.",
    "fra_Latn": "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison et de "
    "conscience et doivent agir les uns envers les autres dans un esprit de fraternité.",
    "rus_Cyrl": "Все люди рождаются свободными и равными в своем достоинстве и правах.",
}


def test_article_1_is_in_its_language_and_the_names_are_those_of_py3langid():
    """The code zxx means: no language."""
    pytest.importorskip("py3langid")
    assert set(language.identifier().labels) == {*FINEWEB, "zxx"}
    for name, text in ARTICLE.items():
        assert detect(text, 0.5) == name


# py3langid's label, a text, and the language that we give it.
ANSWERS = """
de  | 0.9  | eng_Latn | deu_Latn
de  | 0.89 | eng_Latn |
zxx | 1.0  | eng_Latn |
sr  | 1.0  | eng_Latn | srp_Latn
sr  | 1.0  | rus_Cyrl | srp_Cyrl
zh  | 1.0  | eng_Latn | cmn_Hani
"""


@pytest.mark.parametrize("name, probability, text, want", table(ANSWERS))
def test_a_name_needs_its_probability_and_has_the_script_of_the_text(monkeypatch, name, probability, text, want):
    answer = SimpleNamespace(classify=lambda begin: (name, float(probability)))
    monkeypatch.setattr(language, "identifier", lambda: answer)
    assert detect(ARTICLE[text], 0.9) == want
