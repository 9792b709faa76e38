"""Every test imports the project's files as a user's script would: by name, from the repository's root."""
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
