"""
How to start a tool of this room: as a module, from the project's root.

`python corpus/audit.py` looks for modules in this folder instead of the root, and so takes this file for `corpus`.
"""

import sys
from pathlib import Path

print(f"start it from the project's root, python -m corpus.{Path(sys.argv[0]).stem}", file=sys.stderr)
sys.exit(2)
