"""Which learning rate a private logistic regression on a table wants, by simulating many rates at once."""
