# Long context, the last of four stages: windows of 65,536 tokens. Values and commands: table.py.
from configs.long.table import settings_of

globals().update(settings_of("64k", _before))
