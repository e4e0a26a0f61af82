"""Where the data of a step lives, what it takes there, and the laws that a placed program obeys."""
