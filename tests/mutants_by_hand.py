"""What tired people get wrong in each file, for mutants.py."""

# (file, text that stands there exactly once, what it becomes, what went wrong)
MISTAKES = [
]

# (file, the line as mutants.py prints it, its mutant, why nobody could notice)
HARMLESS = [
]
