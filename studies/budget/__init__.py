"""What a loss budget buys: plans over seeds, their speed, uniform choices and other libraries at equal loss."""
