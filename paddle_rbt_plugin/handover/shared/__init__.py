"""What programs of both IRs, and dygraph, share.

- ``conversion``: meshes and placements of a plan as Paddle's own classes.
- ``strategy``: Paddle's Strategy as constraints, and a plan as a Strategy.
- ``zero``, ``recompute``: which states a plan divides, which layers it recomputes.
- ``custom_ops``: custom ops on local tensors.
- ``copies``, ``replicas``: all ranks start from the weights of rank 0; copies on several ranks are compared.
- ``random_streams``: equal for replicas of a tensor, different for every shard.
- ``engine_state``, ``engine_random``: the plan and the random streams of an engine.
- ``gloo``, ``gloo_paddle_2``: communication of static programs between CPU processes.
"""
