"""`python -m adaattn_hf`: the command line, for launchers that take a module."""

from __future__ import annotations

from adaattn_cli import main

if __name__ == "__main__":
    main()
