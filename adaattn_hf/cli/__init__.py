"""The command line `adaattn`: one subcommand, one file."""
