"""What is asked of attention, and what is true: structures, requests, and the reference that tests compare with."""
