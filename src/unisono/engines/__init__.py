"""What runs the replicas of one forward, and the backward that belongs to it."""
