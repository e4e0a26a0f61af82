"""The step program: its language, its text, its view as a graph, and what every verb reads and defines."""
