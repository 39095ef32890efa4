"""How many page reads the queues without a wall clock walk in a second, beside a plain heap."""
