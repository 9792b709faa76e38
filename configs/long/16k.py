# Long context, the second of four stages: windows of 16,384 tokens. Values and commands: table.py.
from configs.long.table import settings_of

globals().update(settings_of("16k", _before))
