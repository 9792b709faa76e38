"""
Print how to start a tool of this folder: as a module, from the project's root.

`python corpus/audit.py` searches this folder for modules instead of the root, so its `import corpus` runs this file.
"""

import sys
from pathlib import Path

print(f"start it from the project's root, python -m corpus.{Path(sys.argv[0]).stem}", file=sys.stderr)
sys.exit(2)
