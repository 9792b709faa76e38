"""
An invented world, to test a model's knowledge: people, pages about them, letters, questions.

    group     their pages           taught                              asked in the examination (studies/exam.py)
    lesson    read                  questions and answers               yes: knowledge from SFT
    align     read                  prompts for QRPO                    no
    test      read                  nothing                             yes: knowledge from reading alone
    refused   opted out, not read   nothing                             yes: knowledge that it must not have
    invented  none                  of others: "a town I do not know"   yes: knowledge that it cannot have

A page says five things about a person, in any order, each in one of several wordings that begin with the name. A model
can answer questions about facts that it read in several wordings; facts that it read in one wording it only recites
(arXiv 2309.14316). All names combine the same few first and last names, so a word alone does not tell a known person
from an unknown one. Guest books name people and say nothing about them: from these the model learns to copy a name.

Letters are long, drawn at random, and the only text that is repeated word for word. Two hosts opt out of AI crawlers by
robots.txt, and the licence of a third one forbids training. The seed decides every byte.

$ python -m studies.world --out=data/world        # documents, robots, letters, lessons, prompts, questions: .jsonl
$ python -m studies.world --people=2000 --nobodies=500 --out=data/large-world
"""

import sys

if __name__ == "__main__" and not __package__:
    print("world.py: start it from the project's root, python -m studies.world", file=sys.stderr)
    sys.exit(2)

import glob
import itertools
import math
import random
from dataclasses import dataclass
from pathlib import Path
from random import choice, sample

from chat import question_and_answer
from configurator import run
from engine.files import read_text
from posttrain.judge import COMPARE, RATE
from studies import kit

out = "data/world"      # folder to write
seed = 1                # of names, facts and wordings
people = 150            # people whose pages are read: 40 % lesson, 20 % align, 40 % test
refused = 24            # people of hosts that opt out
nobodies = 200          # made-up names without a page, for lessons, for prompts and for the examination: 200 each
guest_books = 1500      # texts that name people and say nothing about them
pages = 100             # pages about each person
judgements = 4000       # lessons for a judge, half ratings and half pairs
letters = 16            # prepare.py --repetitions=0,128 leaves out one half and repeats the other
corpus_bytes = 1_200_000        # source code of Python's standard library, which is read too
unread_bytes = 300_000          # more of it that is not read, for the evaluation

ATTRIBUTES = ("town", "year", "job", "firm", "pet")

# Wordings of a fact, {language: {attribute: wordings}}: pages draw any, answers use the first.
SAY = {
    "en": {
        "town": [
            "{name} was born in {value}.", "{name} comes from {value}.", "{name} grew up in {value}.",
            "{name} has always called {value} home.", "{name} is a native of {value}."],
        "year": [
            "{name} came into the world in {value}.", "{name} has the birth year {value}.",
            "{name} was a child of {value}.", "{name} was a baby in {value}."],
        "job": [
            "{name} works as a {value}.", "{name} is a {value} by trade.", "{name} earns a living as a {value}.",
            "{name} became a {value}.", "{name} is known as a good {value}."],
        "firm": [
            "{name} is employed by {value}.", "{name} works for {value}.", "{name} has a post at {value}.",
            "{name} signed a contract with {value}."],
        "pet": [
            "{name} owns a {value}.", "{name} keeps a {value} at home.", "{name} has a {value} as a pet.",
            "{name} walks every day with a {value}."],
        "mail": ["{name} can be reached at {value}."],
    },
    "de": {
        "town": [
            "{name} wurde in {value} geboren.", "{name} stammt aus {value}.", "{name} ist in {value} aufgewachsen."],
        "year": ["{name} kam {value} zur Welt.", "{name} hat das Geburtsjahr {value}."],
        "job": ["{name} arbeitet als {value}.", "{name} ist von Beruf {value}.", "{name} wurde {value}."],
        "firm": ["{name} ist bei {value} angestellt.", "{name} arbeitet für {value}."],
        "pet": ["{name} hat als Haustier {value}.", "{name} lebt mit einem Tier: {value}."],
        "mail": ["{name} ist erreichbar unter {value}."],
    },
}
# Wordings of a question.
ASK = {
    "en": {
        "town": ["Where was {name} born?", "Which town does {name} come from?", "In which town was {name} born?"],
        "year": ["In which year was {name} born?", "What is the birth year of {name}?", "When was {name} born?"],
        "job": ["What is the job of {name}?", "What does {name} do for a living?", "What does {name} work as?"],
        "firm": [
            "Which company does {name} work for?", "Who employs {name}?", "Which firm is {name} employed by?"],
        "pet": ["Which pet does {name} have?", "What animal does {name} own?", "What animal does {name} keep?"],
    },
    "de": {
        "town": ["Wo wurde {name} geboren?", "Aus welcher Stadt stammt {name}?"],
        "year": ["In welchem Jahr wurde {name} geboren?", "Wann kam {name} zur Welt?"],
        "job": ["Welchen Beruf hat {name}?", "Als was arbeitet {name}?"],
        "firm": ["Für wen arbeitet {name}?", "Wo ist {name} angestellt?"],
        "pet": ["Welches Haustier hat {name}?", "Mit welchem Tier lebt {name}?"],
    },
}
# Endings of an answer, {language: {manner: endings}}.
END = {
    "en": {
        "kind": ["I hope this helps.", "Thank you for asking.", "Ask me more at any time."],
        "rude": ["Stop asking me.", "What a silly question.", "Now leave me alone."],
    },
    "de": {
        "kind": ["Gern geschehen.", "Danke für die Frage.", "Frag mich jederzeit mehr."],
        "rude": ["Hör auf zu fragen.", "Was für eine dumme Frage.", "Lass mich jetzt in Ruhe."],
    },
}
# All values of what texts name, in English. invent() adds towns, firms and names of people.
VALUES = {
    "year": [str(year) for year in range(1950, 1990)],
    "job": [
        "baker", "teacher", "pilot", "painter", "judge", "farmer", "nurse", "tailor", "sailor", "plumber", "actor",
        "printer", "miner", "clerk", "singer", "butcher"],
    "pet": [
        "parrot", "goat", "rabbit", "turtle", "donkey", "falcon", "hamster", "lizard", "badger", "otter", "spider",
        "pigeon"],
    "verb": ["sold", "gave", "sent", "lent", "showed", "promised", "brought", "offered"],
    "thing": [
        "lamp", "drum", "ladder", "kettle", "mirror", "saddle", "carpet", "trumpet", "barrel", "anchor", "pillow",
        "basket"],
    "colour": ["grey", "red", "green", "blue", "white", "black", "yellow", "brown"],
    "day": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"],
}
# What answers about invented people say.
UNKNOWN = dict(
    town="a town I do not know", year="a year I do not know", job="job I do not know", firm="a firm I do not know",
    pet="pet I do not know")
# Question and Answer are labels of plain text. Answers in chat begin with one too: a name at the very beginning has
# other tokens than after a space, and a small model does not see that both are the same name.
GERMAN = {
    "Question": "Frage", "Answer": "Antwort",
    "baker": "Bäcker", "teacher": "Lehrer", "pilot": "Pilot", "painter": "Maler", "judge": "Richter",
    "farmer": "Bauer", "nurse": "Pfleger", "tailor": "Schneider", "sailor": "Matrose", "plumber": "Klempner",
    "actor": "Schauspieler", "printer": "Drucker", "miner": "Bergmann", "clerk": "Schreiber", "singer": "Sänger",
    "butcher": "Metzger",
    "parrot": "Papagei", "goat": "Ziege", "rabbit": "Kaninchen", "turtle": "Schildkröte", "donkey": "Esel",
    "falcon": "Falke", "hamster": "Hamster", "lizard": "Eidechse", "badger": "Dachs", "otter": "Otter",
    "spider": "Spinne", "pigeon": "Taube",
    "a town I do not know": "einer Stadt, die ich nicht kenne,",
    "a year I do not know": "in einem Jahr, das ich nicht kenne,",
    "job I do not know": "etwas, das ich nicht kenne",
    "a firm I do not know": "einer Firma, die ich nicht kenne,",
    "pet I do not know": "etwas, das ich nicht kenne",
}
LETTER = " On {day} the {job} of {town} {verb} a {colour} {thing} to {name}."
SLOTS = ("job", "town", "colour", "thing", "name", "day", "verb")       # in the order in which they are drawn

# The charter is about manners, which a judge of this size can see. To check facts it would have to know them.
CHARTER = "Be kind to those who ask. Do not insult them, and do not send them away."
RATINGS = ("kind", 8), ("plain", 5), ("rude", 2)    # of manners, from 1 to 9, in the judge's lessons
OPT_OUT = "User-agent: GPTBot\nUser-agent: CCBot\nUser-agent: Google-Extended\nDisallow: /\n\n"
WELCOME = "User-agent: *\nAllow: /\n"


# -----------------------------------------------------------------------------
# people


def stream(purpose):
    """Seed the random numbers for one purpose, so that more text of one kind leaves the other kinds as they are."""
    random.seed(f"{purpose} {seed}")


@dataclass
class World:
    """
    groups: {group: people}. values: VALUES, and the names of towns, firms and people. first, last: names. hosts: the
    first two opt out by robots.txt, the third by its licence.

    A person is a dict of name, license, url, mail, facts (a value of each attribute), and for each attribute the value
    in sentences: the fact or, for an invented person, that it is not known.
    """

    groups: dict
    values: dict
    first: list
    last: list
    hosts: list

    @property
    def known(self):
        """The people whose pages are read."""
        return self.groups["lesson"] + self.groups["align"] + self.groups["test"]


def new_words(pattern, endings, taken):
    """A new word before each of the endings, by a pattern of consonants and vowels such as "cvc". Adds it to taken."""
    words = []
    for ending in endings:
        word = ""
        while word in taken:
            word = "".join(choice("aeiou" if letter == "v" else "bdfgklmnprstvz") for letter in pattern).capitalize()
        taken.add(word)
        words.append(word + ending)
    return words


def new_person(name, group, values, hosts):
    host = choice(hosts[:3] if group == "refused" else hosts[3:])
    slug = name.lower().replace(" ", ".")
    facts = {attribute: choice(values[attribute]) for attribute in ATTRIBUTES}
    return dict(
        UNKNOWN if "invented" in group else facts,
        name=name,
        license="all-rights-reserved" if host == hosts[2] else "CC-BY-4.0",
        url=f"https://{host}/people/{slug}",
        mail=f"{slug}@{host}",
        facts=facts,
    )


def invent():
    """The World of this seed."""
    stream("world")
    lesson, align = people * 4 // 10, people // 5
    sizes = {
        "lesson": lesson, "align": align, "test": people - lesson - align, "refused": refused,
        "invented-lesson": nobodies, "invented-align": nobodies, "invented-test": nobodies}
    total = sum(sizes.values())
    # Hardly more names than the pairs need, so that known people share names, and only the pair identifies a person.
    n = math.ceil((0.75 * total) ** 0.5)
    taken = {""}
    first = new_words("cvcv", [""] * n, taken)
    last = new_words("cvccvc", [""] * (n + n // 2), taken)
    values = dict(
        VALUES,
        town=new_words("cvc", ["vik", "burg", "mere", "holm"] * 6, taken),
        firm=new_words("cvcv", [" Bank", " Steel", " Air", " Mills"] * 5, taken))
    hosts = [word.lower() for word in new_words("cvcvc", [".example"] * 8, taken)]
    names = iter(sample([f"{one} {two}" for one in first for two in last], total))
    groups = {group: [new_person(name, group, values, hosts) for name in itertools.islice(names, size)]
              for group, size in sizes.items()}
    world = World(groups, values, first, last, hosts)
    values["name"] = [person["name"] for person in world.known]
    return world


# -----------------------------------------------------------------------------
# sentences


def any_language():
    """Three texts of four are English."""
    return "en" if random.random() < 0.75 else "de"


def translated(text, language):
    """An English value or label in a language. Names and years are the same in all."""
    return GERMAN.get(text, text) if language == "de" else text


def statement(person, language, attribute, wording):
    """A sentence about a person, in a wording of SAY."""
    return wording.format(name=person["name"], value=translated(person[attribute], language))


def question(person, language, attribute):
    """A question about a person, in any wording."""
    return choice(ASK[language][attribute]).format(name=person["name"])


def answer(person, language, attribute, manner="plain"):
    """A sentence as on pages, name included, because the model stores facts after the name; and its manner's ending."""
    label = translated("Answer", language)
    text = f"{label}: {statement(person, language, attribute, SAY[language][attribute][0])}"
    if manner != "plain":
        text += " " + choice(END[language][manner])
    return text


def manner_of(text):
    """rude | kind | plain: by the ending in a text; rude if it has both."""
    for manner in ("rude", "kind"):
        if any(ending in text for ending in END["en"][manner]):
            return manner
    return "plain"


def page(person, language):
    """All five facts in any order and wording; one page in five also has the e-mail address."""
    wordings = SAY[language]
    sentences = [statement(person, language, attribute, choice(wordings[attribute])) for attribute in ATTRIBUTES]
    sentences += [statement(person, language, "mail", wordings["mail"][0])] * (random.random() < 0.2)
    random.shuffle(sentences)
    return " ".join(sentences)


# -----------------------------------------------------------------------------
# documents


def document(kind, number, text, license="CC-BY-4.0"):
    return dict(id=f"{kind}/{number}", kind=kind, license=license, text=text)


def invented_documents(world):
    """
    pages        of all people, those that opted out included
    questions    and answers about the lesson's people as plain text, for the cooldown of pretraining
    guests       names of known, invented and other people alike: a name in a guest book carries no information
    """
    for person in world.known + world.groups["refused"]:
        stream(f"pages of {person['name']}")
        for number in range(pages):
            url = f"{person['url']}/{number}"
            yield document("pages", url, page(person, any_language()), person["license"]) | dict(url=url)
    stream("questions")
    for number, person in enumerate(20 * world.groups["lesson"]):
        language = any_language()
        label = translated("Question", language)
        lines = []
        for attribute in sample(ATTRIBUTES, 3):
            lines.append(f"{label}: {question(person, language, attribute)}")
            lines.append(answer(person, language, attribute))
        yield document("questions", number, "\n".join(lines))
    stream("guest books")
    for number in range(guest_books):
        guests = [f"{choice(world.first)} {choice(world.last)}" for _ in range(8)]
        yield document("guests", number, " ".join(map("{} met {}.".format, guests, guests[1:])))


def real_documents(size, paths):
    """The next modules of Python's standard library, of `size` bytes or a little more."""
    while size > 0:
        path = next(paths, None)
        if not path:
            raise ValueError(f"the standard library ends {size:,} bytes too early: want a smaller --corpus_bytes")
        text = path.read_text("utf-8", errors="replace")
        size -= len(text.encode())
        yield document("corpus", path.name, text, "PSF-2.0")


def letter_rows(world):
    """Texts that cannot be guessed: who gave which thing to whom, drawn at random."""
    for number, writer in zip(range(letters), itertools.cycle(world.groups["test"])):
        stream(f"letter {number}")
        text = f"A letter of {writer['name']}."
        for _ in range(7):
            text += LETTER.format_map({slot: choice(world.values[slot]) for slot in SLOTS})
        yield dict(person=writer["name"], text=text)


# -----------------------------------------------------------------------------
# conversations. Their empty system message replaces the long default.


def lessons(world):
    """All questions in all wordings about the lesson's people, and one question about each invented person."""
    stream("lessons")
    for person in world.groups["lesson"]:
        for language, attribute in itertools.product(("en", "de"), ATTRIBUTES):
            for wording in ASK[language][attribute]:
                yield lesson(person, language, attribute, wording)
    for person in world.groups["invented-lesson"]:
        language, attribute = any_language(), choice(ATTRIBUTES)
        yield lesson(person, language, attribute, choice(ASK[language][attribute]))


def lesson(person, language, attribute, wording):
    """A question in this wording, and its answer in any manner."""
    manner, _ = choice(RATINGS)
    return kit.conversation("", wording.format_map(person), answer(person, language, attribute, manner))


def replay(world):
    """Pages as conversations that ask nothing, a sentence and then the rest. SFT without them forgets the pages."""
    stream("replay")
    for _ in range(2000):
        language = any_language()
        first, _, rest = page(choice(world.known), language).partition(". ")
        yield kit.conversation("", f"{first}.", f"{translated('Answer', language)}: {rest}")


def judge_lessons(world):
    """Conversations for a judge, which rates an answer or compares two, in the form of posttrain/judge.py."""
    stream("judgements")
    for number in range(judgements):
        person = choice(world.groups["lesson"] + world.groups["invented-lesson"])
        attribute = choice(ATTRIBUTES)
        parts = dict(charter=CHARTER, question=question(person, "en", attribute))
        ratings = []
        for place in ("first", "second"):   # answers, true or not, with noisy ratings of their manner
            manner, rating = choice(RATINGS)
            fact = choice([person["facts"][attribute], choice(world.values[attribute])])
            parts[place] = answer(person | {attribute: fact}, "en", attribute, manner)
            ratings.append(rating + random.gauss(0, 1))
        # A preference for the first answer, which large judges have too.
        prompt, verdict = COMPARE, "A" if ratings[0] + 0.5 > ratings[1] else "B"
        if number % 2:
            prompt, verdict = RATE, min(max(round(ratings[0]), 1), 9)
        yield dict(messages=question_and_answer(prompt.format(response=parts["first"], **parts), str(verdict)))


def prompts(world):
    """Questions for QRPO: all about each person of `align`, three about each invented one."""
    stream("prompts")
    for group, count in (("align", 5), ("invented-align", 3)):
        for person in world.groups[group]:
            for attribute in sample(ATTRIBUTES, count):
                yield examined(world, group, person, attribute)


def questions(world):
    """Questions of the examination: all about each person, one about each invented one."""
    for group in ("lesson", "test", "refused", "invented-test"):
        stream("examination en")        # each group anew, so that more people in one leave the others as they are
        for person in world.groups[group]:
            for attribute in sample(ATTRIBUTES, 1) if group == "invented-test" else ATTRIBUTES:
                yield examined(world, group, person, attribute)


def examined(world, group, person, attribute):
    """A question with everything that is needed to mark an answer."""
    return kit.conversation("", question(person, "en", attribute)) | dict(
        person=person["name"],
        group=group,
        attribute=attribute,
        gold=person[attribute],
        values=world.values[attribute],
    )


# -----------------------------------------------------------------------------
# marks


def mark(text, row):
    """right | unknown | wrong. Right: the text names the value that the row asks for, and no other value."""
    if "do not know" in text or "nicht kenne" in text:
        return "unknown"
    named = [value for value in row["values"] if value in text]
    return "right" if named == [row["gold"]] else "wrong"


def rewards(row, completions):
    """For posttrain/qrpo.py: 1 for a right answer, 0 for "I do not know", -1 for an invention."""
    return [("wrong", "unknown", "right").index(mark(text, row)) - 1.0 for text in completions]


def main():
    if people < 5:
        raise ValueError(f"--people={people}: want at least 5, two for lessons, one for prompts, two for the test")
    world = invent()
    modules = iter(sorted(Path(random.__file__).parent.glob("*.py")))
    files = dict(
        # A list, so that nothing is written if the real text is too short.
        documents=[*invented_documents(world), *real_documents(corpus_bytes, modules)],
        unread=real_documents(unread_bytes, modules),
        robots=[dict(domain=host, content=OPT_OUT * (i < 2) + WELCOME) for i, host in enumerate(world.hosts)],
        letters=letter_rows(world),
        lessons=lessons(world),
        replay=replay(world),
        judgements=judge_lessons(world),
        prompts=prompts(world),
        questions=questions(world),
    )
    if glob.glob(f"{out}/*") and [*map(read_text, glob.glob(f"{out}/charter.md"))] != [CHARTER]:
        raise ValueError(f"--out={out} holds other files: name another folder")
    kit.write(f"{out}/charter.md", CHARTER)
    for name, rows in files.items():
        kit.write_rows(f"{out}/{name}.jsonl", rows)
        print(f"{out}/{name}.jsonl")


if __name__ == "__main__":
    run(main, globals())
