"""Machines and their rates: profiles, named machines, and the probe."""
