"""
An invented world, to test what a model knows: people, pages about them, letters, questions.

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

import glob
import itertools
import math
import random
import re
from pathlib import Path
from random import choice, sample

from chat import question_and_answer
from configurator import run
from engine.files import read_text
from posttrain.judge import COMPARE, RATE
from studies import kit  # first: a study started by its path gets studies/studies.py here, which prints the command

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

ATTRIBUTES = "town year job firm pet".split()

# {"KIND LANGUAGE SUBJECT": its wordings}: pages draw any `say`, answers use the first and may `end` in a manner.
# And {subject: all its values}, in English; `unknown` are those of invented people. invent() adds names and people.
WORLD = {key: texts.split(" | ") for key, texts in re.findall("(.+?): (.+)", """
say en town: {name} was born in {value}. | {name} comes from {value}. | {name} grew up in {value}. \
| {name} has always called {value} home. | {name} is a native of {value}.
say en year: {name} came into the world in {value}. | {name} has the birth year {value}. \
| {name} was a child of {value}. | {name} was a baby in {value}.
say en job: {name} works as a {value}. | {name} is a {value} by trade. | {name} earns a living as a {value}. \
| {name} became a {value}. | {name} is known as a good {value}.
say en firm: {name} is employed by {value}. | {name} works for {value}. | {name} has a post at {value}. \
| {name} signed a contract with {value}.
say en pet: {name} owns a {value}. | {name} keeps a {value} at home. | {name} has a {value} as a pet. \
| {name} walks every day with a {value}.
say en mail: {name} can be reached at {value}.
say de town: {name} wurde in {value} geboren. | {name} stammt aus {value}. | {name} ist in {value} aufgewachsen.
say de year: {name} kam {value} zur Welt. | {name} hat das Geburtsjahr {value}.
say de job: {name} arbeitet als {value}. | {name} ist von Beruf {value}. | {name} wurde {value}.
say de firm: {name} ist bei {value} angestellt. | {name} arbeitet für {value}.
say de pet: {name} hat als Haustier {value}. | {name} lebt mit einem Tier: {value}.
say de mail: {name} ist erreichbar unter {value}.

ask en town: Where was {name} born? | Which town does {name} come from? | In which town was {name} born?
ask en year: In which year was {name} born? | What is the birth year of {name}? | When was {name} born?
ask en job: What is the job of {name}? | What does {name} do for a living? | What does {name} work as?
ask en firm: Which company does {name} work for? | Who employs {name}? | Which firm is {name} employed by?
ask en pet: Which pet does {name} have? | What animal does {name} own? | What animal does {name} keep?
ask de town: Wo wurde {name} geboren? | Aus welcher Stadt stammt {name}?
ask de year: In welchem Jahr wurde {name} geboren? | Wann kam {name} zur Welt?
ask de job: Welchen Beruf hat {name}? | Als was arbeitet {name}?
ask de firm: Für wen arbeitet {name}? | Wo ist {name} angestellt?
ask de pet: Welches Haustier hat {name}? | Mit welchem Tier lebt {name}?

end en kind: I hope this helps. | Thank you for asking. | Ask me more at any time.
end en rude: Stop asking me. | What a silly question. | Now leave me alone.
end de kind: Gern geschehen. | Danke für die Frage. | Frag mich jederzeit mehr.
end de rude: Hör auf zu fragen. | Was für eine dumme Frage. | Lass mich jetzt in Ruhe.

year: 1950 | 1951 | 1952 | 1953 | 1954 | 1955 | 1956 | 1957 | 1958 | 1959 | 1960 | 1961 | 1962 | 1963 | 1964 | 1965 \
| 1966 | 1967 | 1968 | 1969 | 1970 | 1971 | 1972 | 1973 | 1974 | 1975 | 1976 | 1977 | 1978 | 1979 | 1980 | 1981 | 1982 \
| 1983 | 1984 | 1985 | 1986 | 1987 | 1988 | 1989
job: baker | teacher | pilot | painter | judge | farmer | nurse | tailor | sailor | plumber | actor | printer | miner \
| clerk | singer | butcher
pet: parrot | goat | rabbit | turtle | donkey | falcon | hamster | lizard | badger | otter | spider | pigeon
verb: sold | gave | sent | lent | showed | promised | brought | offered
thing: lamp | drum | ladder | kettle | mirror | saddle | carpet | trumpet | barrel | anchor | pillow | basket
colour: grey | red | green | blue | white | black | yellow | brown
day: Monday | Tuesday | Wednesday | Thursday | Friday | Saturday | Sunday
unknown: a town I do not know | a year I do not know | job I do not know | a firm I do not know | pet I do not know
""")}
# Question and Answer are labels of plain text. Answers in chat begin with one too: a name at the very beginning has
# other tokens than after a space, and a small model does not see that both are the same name.
GERMAN = dict(re.findall(r"(\w[\w ]*) = ([\w, ]*[\w,])", """
Question = Frage | Answer = Antwort
baker = Bäcker | teacher = Lehrer | pilot = Pilot | painter = Maler | judge = Richter | farmer = Bauer | nurse = Pfleger
tailor = Schneider | sailor = Matrose | plumber = Klempner | actor = Schauspieler | printer = Drucker | miner = Bergmann
clerk = Schreiber | singer = Sänger | butcher = Metzger
parrot = Papagei | goat = Ziege | rabbit = Kaninchen | turtle = Schildkröte | donkey = Esel | falcon = Falke
hamster = Hamster | lizard = Eidechse | badger = Dachs | otter = Otter | spider = Spinne | pigeon = Taube
a town I do not know = einer Stadt, die ich nicht kenne, | a year I do not know = in einem Jahr, das ich nicht kenne,
job I do not know = etwas, das ich nicht kenne | a firm I do not know = einer Firma, die ich nicht kenne,
pet I do not know = etwas, das ich nicht kenne
"""))
LETTER = " On {day} the {job} of {town} {verb} a {colour} {thing} to {name}."

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


def invent():
    """
    Add the people and names of this seed to WORLD: {group: people}, {subject: all its values}. The pages of the people
    in `known` are read. Hosts 0 and 1 opt out by robots.txt, host 2 by its licence.

    A person is a dict of name, license, url, mail, facts (a value of each attribute), and for each attribute the value
    in sentences: the fact or, for an invented person, that it is not known.
    """
    taken = {""}

    def names(pattern, endings):
        """A new word before each of the endings, by a pattern of consonants and vowels such as "cvc"."""
        found = []
        for ending in endings:
            word = ""
            while word in taken:
                word = "".join(choice("aeiou" if kind == "v" else "bdfgklmnprstvz") for kind in pattern).capitalize()
            taken.add(word)
            found.append(word + ending)
        return found

    def person(name, group):
        host = choice(hosts[:3] if group == "refused" else hosts[3:])
        slug = name.lower().replace(" ", ".")
        facts = {key: choice(WORLD[key]) for key in ATTRIBUTES}
        return dict(
            zip(ATTRIBUTES, WORLD["unknown"]) if "invented" in group else facts,
            name=name,
            license="all-rights-reserved" if host == hosts[2] else "CC-BY-4.0",
            url=f"https://{host}/people/{slug}",
            mail=f"{slug}@{host}",
            facts=facts,
        )

    stream("world")
    lesson, align = people * 4 // 10, people // 5
    sizes = lesson, align, people - lesson - align, refused, nobodies, nobodies, nobodies
    # Hardly more names than the pairs need, so that known people share names, and only the pair identifies a person.
    n = math.ceil((0.75 * sum(sizes)) ** 0.5)
    WORLD.update(
        first=names("cvcv", [""] * n),
        last=names("cvccvc", [""] * (n + n // 2)),
        town=names("cvc", "vik burg mere holm".split() * 6),
        firm=names("cvcv", " Bank, Steel, Air, Mills".split(",") * 5),
    )
    hosts = WORLD["host"] = [name.lower() for name in names("cvcvc", [".example"] * 8)]
    drawn = iter(sample([f"{first} {last}" for first in WORLD["first"] for last in WORLD["last"]], sum(sizes)))
    for group, size in zip("lesson align test refused invented-lesson invented-align invented-test".split(), sizes):
        WORLD[group] = [person(name, group) for name in itertools.islice(drawn, size)]
    WORLD["known"] = WORLD["lesson"] + WORLD["align"] + WORLD["test"]
    WORLD["name"] = [person["name"] for person in WORLD["known"]]


# -----------------------------------------------------------------------------
# sentences


def any_language():
    """Three texts of four are English."""
    return "en" if random.random() < 0.75 else "de"


def translated(text, language):
    """An English value or label in a language. Names and years are the same in all."""
    return GERMAN.get(text, text) if language == "de" else text


def sentence(key, person, first=False):
    """A wording of WORLD about a person: any one, or the first. key: KIND LANGUAGE ATTRIBUTE."""
    _, language, attribute = key.split()
    wording = WORLD[key][0] if first else choice(WORLD[key])
    return wording.format(name=person["name"], value=translated(person[attribute], language))


def answer(person, language, attribute, manner="plain"):
    """A sentence as on pages, name included, because the model stores facts after the name; and its manner's ending."""
    said = f"{translated('Answer', language)}: {sentence(f'say {language} {attribute}', person, first=True)}"
    if manner != "plain":
        said += " " + choice(WORLD[f"end {language} {manner}"])
    return said


def manner_of(text):
    """rude | kind | plain: by the ending in a text; rude if it has both."""
    for manner in ("rude", "kind"):
        if any(words in text for words in WORLD[f"end en {manner}"]):
            return manner
    return "plain"


def page(person, language):
    """All five facts in any order and wording; one page in five also has the e-mail address."""
    sentences = [sentence(f"say {language} {attribute}", person) for attribute in ATTRIBUTES]
    sentences += [sentence(f"say {language} mail", person, first=True)] * (random.random() < 0.2)
    random.shuffle(sentences)
    return " ".join(sentences)


# -----------------------------------------------------------------------------
# documents


def document(kind, number, text, license="CC-BY-4.0"):
    return dict(id=f"{kind}/{number}", kind=kind, license=license, text=text)


def invented_documents():
    """
    pages        of all people, those that opted out included
    questions    and answers about the lesson's people as plain text, for the cooldown of pretraining
    guests       names of known, invented and other people alike: a name in a guest book carries no information
    """
    for person in WORLD["known"] + WORLD["refused"]:
        stream(f"pages of {person['name']}")
        for number in range(pages):
            url = f"{person['url']}/{number}"
            yield document("pages", url, page(person, any_language()), person["license"]) | dict(url=url)
    stream("questions")
    for number, person in enumerate(20 * WORLD["lesson"]):
        language = any_language()
        text = ""
        for attribute in sample(ATTRIBUTES, 3):
            asked = sentence(f"ask {language} {attribute}", person)
            text += f"\n{translated('Question', language)}: {asked}\n{answer(person, language, attribute)}"
        yield document("questions", number, text.strip())
    stream("guest books")
    for number in range(guest_books):
        guests = [f"{choice(WORLD['first'])} {choice(WORLD['last'])}" for _ in range(8)]
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


def letter_rows():
    """Texts that cannot be guessed: who gave which thing to whom, drawn at random."""
    for number, writer in zip(range(letters), itertools.cycle(WORLD["test"])):
        stream(f"letter {number}")
        text = f"A letter of {writer['name']}."
        for _ in range(7):
            text += LETTER.format_map({slot: choice(WORLD[slot])
                                       for slot in "job town colour thing name day verb".split()})
        yield dict(person=writer["name"], text=text)


# -----------------------------------------------------------------------------
# conversations. Their empty system message replaces the long default.


def lessons():
    """All questions in all wordings about the lesson's people, and one question about each invented person."""
    stream("lessons")
    for person in WORLD["lesson"] + WORLD["invented-lesson"]:
        known = person in WORLD["lesson"]
        subjects = itertools.product(("en", "de"), ATTRIBUTES) if known else [(any_language(), choice(ATTRIBUTES))]
        for language, attribute in subjects:
            wordings = WORLD[f"ask {language} {attribute}"]
            for wording in wordings if known else [choice(wordings)]:
                manner, _ = choice(RATINGS)
                yield kit.conversation("", wording.format_map(person), answer(person, language, attribute, manner))


def replay():
    """Pages as conversations that ask nothing, a sentence and then the rest. SFT without them forgets the pages."""
    stream("replay")
    for _ in range(2000):
        language = any_language()
        first, _, rest = page(choice(WORLD["known"]), language).partition(". ")
        yield kit.conversation("", f"{first}.", f"{translated('Answer', language)}: {rest}")


def judge_lessons():
    """Conversations for a judge, which rates an answer or compares two, in the form of posttrain/judge.py."""
    stream("judgements")
    for number in range(judgements):
        person, attribute = choice(WORLD["lesson"] + WORLD["invented-lesson"]), choice(ATTRIBUTES)
        asked = dict(charter=CHARTER, question=sentence(f"ask en {attribute}", person))
        ratings = []
        for place in ("first", "second"):   # answers, true or not, with noisy ratings of their manner
            manner, rating = choice(RATINGS)
            fact = choice([person["facts"][attribute], choice(WORLD[attribute])])
            asked[place] = answer(person | {attribute: fact}, "en", attribute, manner)
            ratings.append(rating + random.gauss(0, 1))
        # A preference for the first answer, which large judges have too.
        prompt, verdict = COMPARE, "A" if ratings[0] + 0.5 > ratings[1] else "B"
        if number % 2:
            prompt, verdict = RATE, min(max(round(ratings[0]), 1), 9)
        asked = prompt.format(response=asked["first"], **asked)
        yield dict(messages=question_and_answer(asked, str(verdict)))


def questions(purpose, counts):
    """
    Questions, with everything that is needed to mark an answer.

    counts: {group: how many about each of its people}; 0 = one about each attribute, in order. The prompts share one
    stream of random numbers; each group of the examination starts its stream anew.
    """
    for group, count in counts.items():
        if group != "invented-align":
            stream(purpose)
        for person in WORLD[group]:
            for attribute in sample(ATTRIBUTES, count) if count else ATTRIBUTES:
                yield kit.conversation("", sentence(f"ask en {attribute}", person)) | dict(
                    person=person["name"],
                    group=group,
                    attribute=attribute,
                    gold=person[attribute],
                    values=WORLD[attribute],
                )


# -----------------------------------------------------------------------------
# marks


def judge(text, row):
    """right | unknown | wrong. Right: the text names the value that the row asks for, and no other value."""
    if "do not know" in text or "nicht kenne" in text:
        return "unknown"
    named = [value for value in row["values"] if value in text]
    return "right" if named == [row["gold"]] else "wrong"


def rewards(row, completions):
    """For posttrain/qrpo.py: 1 for a right answer, 0 for "I do not know", -1 for an invention."""
    return [("wrong", "unknown", "right").index(judge(text, row)) - 1.0 for text in completions]


def main():
    if people < 5:
        raise ValueError(f"--people={people}: want at least 5, two for lessons, one for prompts, two for the test")
    invent()
    modules = iter(sorted(Path(random.__file__).parent.glob("*.py")))
    files = dict(
        # A list, so that nothing is written if the real text is too short.
        documents=[*invented_documents(), *real_documents(corpus_bytes, modules)],
        unread=real_documents(unread_bytes, modules),
        robots=[dict(domain=host, content=OPT_OUT * (i < 2) + WELCOME) for i, host in enumerate(WORLD["host"])],
        letters=letter_rows(),
        lessons=lessons(),
        replay=replay(),
        judgements=judge_lessons(),
        prompts=questions("prompts", {"align": 5, "invented-align": 3}),
        questions=questions("examination en", {"lesson": 0, "test": 0, "refused": 0, "invented-test": 1}),
    )
    if glob.glob(f"{out}/*") and [*map(read_text, glob.glob(f"{out}/charter.md"))] != [CHARTER]:
        raise ValueError(f"--out={out} holds other files: name another folder")
    kit.write(f"{out}/charter.md", CHARTER)
    for name, rows in files.items():
        kit.write_rows(f"{out}/{name}.jsonl", rows)
        print(f"{out}/{name}.jsonl")


if __name__ == "__main__":
    run(main, globals())
