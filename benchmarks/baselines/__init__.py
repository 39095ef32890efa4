"""What the engine is compared with: programs and techniques that a user would reach for instead."""
