"""From text and a loss budget to a plan and its proof: measure, choose, verify."""
