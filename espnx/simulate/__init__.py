"""What so many of these devices would bring, answered without them: machines as queues in an order
of events, workloads that ask them, and how far to believe it. Nothing here waits for a clock."""
