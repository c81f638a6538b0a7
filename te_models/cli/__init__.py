"""The `te-models` command line: options in, text out.

Not here: anything that Python code would call instead.
"""

from te_models.cli.commands import main

__all__ = ["main"]
