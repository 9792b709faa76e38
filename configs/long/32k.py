# Long context, the third of four stages: windows of 32,768 tokens. Values and commands: table.py.
from configs.long.table import settings_of

globals().update(settings_of("32k", _before))
