"""
How to start a study: as a module, from the project's root.

`python studies/ablate.py` looks for modules in this folder instead of the root, and so takes this file for `studies`.
"""

import sys
from pathlib import Path

name = Path(sys.argv[0]).stem
print(f"{name}.py: start it from the project's root, python -m studies.{name}", file=sys.stderr)
sys.exit(2)
