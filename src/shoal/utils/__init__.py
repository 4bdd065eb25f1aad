"""Small tools without a package of their own: random numbers, locks, tables, torch flags."""
