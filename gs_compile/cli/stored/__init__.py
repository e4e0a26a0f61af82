"""What `greedysnake store` does with the durable runs in a directory."""
