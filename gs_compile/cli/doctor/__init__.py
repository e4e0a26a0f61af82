"""Is this machine fit for a run?"""
