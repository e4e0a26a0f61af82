"""What a machine can do: profiles, named machines, and the probe."""
