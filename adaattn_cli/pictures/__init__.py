"""Plans as people see them: a grid of layers by heads, one line of what it costs and buys, and a page with a slider."""
