# Long context, the first of four stages: windows of 8,192 tokens. Values and commands: table.py.
from configs.long.table import settings_of

globals().update(settings_of("8k", _before))
