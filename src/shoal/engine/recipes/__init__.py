"""What members need in common to train as one stack, and the program that trains them."""
