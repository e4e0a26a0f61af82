"""Where the data of a step lives, how much memory it takes there, and the laws that a placed program obeys."""
