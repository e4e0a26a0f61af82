"""The part that a user touches: backend, optimizers, and models that live on the tiers."""
