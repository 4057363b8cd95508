"""Hands plans to Paddle's legacy chain: DistributedContext, Completer, Partitioner, Resharder."""
