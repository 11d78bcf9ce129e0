"""The command `adaattn`, a package of its own: it answers at once, and imports `adaattn_hf` when a command runs."""

from __future__ import annotations


def main() -> None:
    """Run the command line; exits the process with the command's code, 130 where Ctrl-C came before there was one."""
    try:
        from .app import run

        run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
