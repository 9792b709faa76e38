"""
How to start SFT and QRPO: as a module, from the project's root.

`python posttrain/sft.py` looks for modules in this folder instead of the root, and so takes this file for `posttrain`.
"""

import sys
from pathlib import Path

name = Path(sys.argv[0]).stem
print(f"{name}.py: start it from the project's root, python -m posttrain.{name}", file=sys.stderr)
sys.exit(2)
