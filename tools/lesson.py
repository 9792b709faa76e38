"""The command line of tests/lesson.py; its docstring has the usage."""
import sys

if __name__ == "__main__" and not __package__:
    print("lesson.py: start it from the project's root, python -m tools.lesson", file=sys.stderr)
    sys.exit(2)

from configurator import run
from tests import lesson

run(lesson.main, vars(lesson))
