"""The parts of the random search: what it draws, how it judges, how it goes on, what it writes."""
