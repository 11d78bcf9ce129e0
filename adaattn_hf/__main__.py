"""`python -m adaattn_hf`: the command line, for launchers that take a module."""

from adaattn_cli import main

if __name__ == "__main__":
    main()
