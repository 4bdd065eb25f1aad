"""Recipes, which say which members can train as one stack, and the program that trains them."""
