"""
Make conversations of the docstrings of Python's standard library, to try the commands of docs/posttraining.md.

Writes conversations.jsonl, heldout.jsonl (100 conversations) and prompts.jsonl (100 questions) here.
"""

import ast
import glob
import json
import os
import random
import sys
import sysconfig

rows = []
for path in sorted(glob.glob(sysconfig.get_path("stdlib") + "/*.py")):
    for node in ast.walk(ast.parse(open(path, encoding="utf-8").read())):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            question = f"What does {node.name}({ast.unparse(node.args)}) do?"
            answer = " ".join(ast.get_docstring(node).split("\n\n")[0].split())
            rows.append([dict(role="user", content=question), dict(role="assistant", content=answer)])
random.Random(1).shuffle(rows)
parts = dict(conversations=rows[100:], heldout=rows[:100], prompts=[row[:1] for row in rows[:100]])
for name in parts:
    if os.path.exists(f"{name}.jsonl"):
        print(f"{name}.jsonl: there is one already, type this in another folder", file=sys.stderr)
        sys.exit(2)
for name, part in parts.items():
    with open(f"{name}.jsonl", "w") as f:
        f.writelines(json.dumps(dict(messages=messages)) + "\n" for messages in part)
