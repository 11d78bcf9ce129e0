"""What is asked of attention, and what is true: structures, calls, and the reference that tests compare with."""
