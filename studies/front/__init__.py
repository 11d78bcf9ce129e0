"""The figures of the first page: what is timed, and how."""
